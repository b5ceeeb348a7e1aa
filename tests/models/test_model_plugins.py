"""Model families and quantization methods that other packages and programs add."""

import json

import pytest

import quire
from quire import LLM, SamplingParams
from quire.cli import models
from quire.config import families, plugins
from quire.config.args import EngineArgs
from quire.config.quantization import read_quantization
from quire.types.errors import ConfigError, ModelError, PlugInError
from serving import Running
from tiny_model import make_model

CODE = """
from quire.config.families.card import Card
from quire.config.quantization_methods import QuantizationMethod
from quire.models.llama import Llama

class Acme(Llama):
    pass

def register():
    import quire
    quire.ModelRegistry.register_model("GeneralForCausalLM", "acme_package:Acme")

good = Card("Acme", "dense", "acme_package:Acme", ("AcmeForCausalLM",), {"acme": {}})
twin = Card("Acme twin", "dense", "acme_package:Acme", ("TwinForCausalLM",), {"acme": {}})
llama = Card("My Llama", "dense", "acme_package:Acme", ("LlamaForCausalLM",), {"my_llama": {}})
vague = "acme_package:Acme"

def is_mine(config):
    return config.get("made_by") == "acme"

mine = QuantizationMethod("acme", "acme_package:Nothing", names=("acme4",), applies=is_mine, tensors={"packed": 4})
same = QuantizationMethod("other", "acme_package:Nothing", names=("awq_marlin",))
"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 12, 19, 26, 33]}


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path)


def rename(model, architecture):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))


def tokens(model):
    with LLM(str(model), device="cpu", max_num_seqs=2, kv_cache_memory_bytes=4 << 20) as llm:
        return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_cards_of_packages_and_those_that_take_names_of_others(packages, caplog):
    points = "[quire.models]\na = acme_package:good\nb = acme_package:twin\nc = acme_package:llama\nd = acme_package:vague\n"
    packages.add("acme_package", points, CODE)
    assert families.architectures()["AcmeForCausalLM"].title == "Acme"
    assert families.architectures()["LlamaForCausalLM"].title == "Llama 1 to 3"
    lines = [record.getMessage() for record in caplog.records if record.name == plugins.__name__]
    assert len(lines) == 3 and all("of acme_package 1.0" in line for line in lines)
    assert "'Acme twin' (acme_package:Acme) has the model_type 'acme' of the family 'Acme' (acme_package:Acme)" in lines[0]
    assert "has the architecture 'LlamaForCausalLM' of the family 'Llama 1 to 3' (quire.models.llama:Llama)" in lines[1]
    assert "it must be a Card or a tuple of Cards; got str" in lines[2]
    with pytest.raises(PlugInError, match=r"the model family 'b' of acme_package 1.0"):
        EngineArgs(model="m", require_plugins=True)
    assert models.gather()["architectures"]["AcmeForCausalLM"] == "acme_package:Acme"


def test_a_class_that_a_general_plugin_registers(packages, model):
    packages.add("acme_package", "[quire.general_plugins]\nacme = acme_package:register\n", CODE)
    expected = tokens(model)
    rename(model, "GeneralForCausalLM")
    assert tokens(model) == expected
    assert "GeneralForCausalLM" in quire.ModelRegistry.get_supported_archs()


def test_a_class_that_a_program_registers_is_known_in_the_engine_process(packages, model, monkeypatch):
    """It is a class of Quire's own here: a forked engine of the tests does not see packages that are installed later."""
    expected = tokens(model)
    rename(model, "ProgramForCausalLM")
    from quire.models.llama import Llama

    quire.ModelRegistry.register_model("ProgramForCausalLM", Llama)
    quire.ModelRegistry.register_model("ProgramForCausalLM", "quire.models.llama:Llama")  # twice is no error
    running = Running(model)
    try:
        request = {"prompt": PROMPT["prompt_token_ids"], "max_tokens": 6, "temperature": 0, "ignore_eos": True,
                   "return_token_ids": True}  # fmt: skip
        assert running.http.post("/v1/completions", json=request).json()["choices"][0]["token_ids"] == expected
    finally:
        running.close()


@pytest.mark.parametrize(
    ("architecture", "target", "message"),
    [
        ("LlamaForCausalLM", "acme_package:Acme", "has the architecture 'LlamaForCausalLM' of the family 'Llama 1 to 3'"),
        ("NewForCausalLM", "no colon", "must have architectures and a model 'module:Class'; got 'no colon'"),
        ("NewForCausalLM", 5, "model_cls must be a class or 'module:Class'; got 5"),
        ("", "acme_package:Acme", "model_arch must be the name of an architecture; got ''"),
    ],
)
def test_registrations_that_are_refused(packages, architecture, target, message):
    with pytest.raises(ConfigError) as refused:
        quire.ModelRegistry.register_model(architecture, target)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere_at_all:Acme", "the model class nowhere_at_all:Acme cannot be imported in this process: No module named"),
        ("acme_package:Missing", "the model class acme_package:Missing cannot be imported in this process"),
        ("acme_package:good", "must be a subclass of quire.models.decoder.Decoder; vLLM's are not supported"),
    ],
)
def test_classes_that_cannot_be_used(packages, model, target, message):
    packages.add("acme_package", "", CODE)
    rename(model, "NewForCausalLM")
    quire.ModelRegistry.register_model("NewForCausalLM", target)
    with pytest.raises(ModelError) as refused:
        tokens(model)
    assert message in str(refused.value)


def test_quantization_methods_of_packages(packages, caplog):
    packages.add("acme_package", "[quire.quantization]\na = acme_package:mine\nb = acme_package:same\n", CODE)
    for config in ({"quant_method": "acme"}, {"quant_method": "ACME4"}, {"made_by": "acme"}):
        assert read_quantization({"quantization_config": config}, None).method == "acme"
    assert read_quantization({"quantization_config": {"quant_method": "awq_marlin", "made_by": "acme"}}, None).method == "awq"
    with pytest.raises(ModelError, match=r"these methods are: awq, .*, acme"):
        read_quantization({"quantization_config": {"quant_method": "unknown"}}, None)
    assert "the quantization method 'other' (acme_package:Nothing) has the name 'awq_marlin' of the method 'awq'" in caplog.text
    with pytest.raises(PlugInError, match=r"the quantization method 'b' of acme_package 1.0"):
        EngineArgs(model="m", require_plugins=True)


def test_a_scheme_that_cannot_be_imported(packages, model):
    packages.add("acme_package", "[quire.quantization]\na = acme_package:mine\n", CODE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "acme"}}))
    with pytest.raises(
        ModelError, match=r"the scheme acme_package:Nothing of the quantization method 'acme' cannot be imported"
    ):
        tokens(model)
