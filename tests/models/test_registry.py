"""Which class serves which architecture."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from quire.config.families import architectures, cards, gguf_rows
from quire.models.registry import build_model
from quire.types.cache import LayerCache
from quire.types.errors import ModelError


def facts(**changes):
    hf = {"num_attention_heads": 2, "intermediate_size": 8, "hidden_act": "silu"}
    base = {"architecture": "LlamaForCausalLM", "hf": hf, "vocab_size": 9, "hidden_size": 8, "max_position": 16}
    return SimpleNamespace(
        **base | {"layers": (LayerCache(1, 4),) * 2, "states": (), "files": SimpleNamespace(path="here")} | changes
    )


def test_a_model_is_built_without_memory():
    model = build_model(facts())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert len(model.attentions) == 2
    assert not model.training


def test_unknown_architectures_and_implementations():
    with pytest.raises(ModelError, match="no model family serves NovelForCausalLM"):
        build_model(facts(architecture="NovelForCausalLM"), "quire")
    with pytest.raises(ModelError, match="'magic'"):
        build_model(facts(), "magic")


def test_a_configuration_that_lacks_a_field_is_named():
    with pytest.raises(ModelError, match="here lacks 'intermediate_size'"):
        build_model(facts(hf={"num_attention_heads": 2}))


@pytest.mark.parametrize(
    ("imported", "late"),
    [
        ("quire.models.registry", "torch"),
        ("quire.load.load", "gguf"),
        ("quire.models.decoder", "quire.models.llama transformers"),
    ],
)
def test_what_is_imported_only_when_asked_for(imported, late):
    script = f"import sys, {imported}; print(*(name for name in {late.split()} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("target", sorted({card.model for card in architectures().values()}))
def test_every_target_exists(target):
    import importlib

    module, name = target.split(":")
    assert hasattr(importlib.import_module(f"quire.models.{module}"), name)


def test_no_two_cards_claim_the_same_name():
    found = [name for card in cards() for name in (*card.architectures, *card.types)]
    found += [(row.name, row.when is None) for _, row in gguf_rows()]
    assert len(found) == len(set(found))
