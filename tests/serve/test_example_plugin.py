"""The package of examples/plugin as pip installs it: used, broken in six ways, and removed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from server_process import serving

from patience import wait_for
from quire import LLM, ModelRegistry, SamplingParams
from serving import error_of
from tiny_model import make_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
PROMPTS = ["the quick brown fox", "a page is a page"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FIELDS = {"hidden_size": "width", "intermediate_size": "inner_width", "num_hidden_layers": "depth"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory that the package was built for and installed into, without an index."""
    directory = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, directory / "source")
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
            "--disable-pip-version-check", "--target", str(directory / "site"), str(directory / "source")]  # fmt: skip
    subprocess.run(line, check=True)
    return directory / "site"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Llama, the same as a checkpoint of the family `example`, one of ternary matrices, and the same in floats."""
    directory = tmp_path_factory.mktemp("checkpoints")
    tensors = load_file(make_model(directory) / "model.safetensors")
    tensors = {name: torch.rand_like(tensor) + 0.5 if "norm" in name else tensor for name, tensor in tensors.items()}
    config = json.loads((directory / "config.json").read_text())
    renamed = {FIELDS.get(name, name): value for name, value in config.items() if name != "hidden_act"}
    other = {
        re.sub(r"^model\.", "example.", name): tensor - 1 if "norm" in name else tensor for name, tensor in tensors.items()
    }
    ternary, floats = {}, {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            ternary[name] = floats[name] = tensor
            continue
        values, scale = torch.randint(-1, 2, tensor.shape, dtype=torch.int8), torch.rand(len(tensor)) * 0.3 + 0.1
        ternary |= {name.replace("weight", "values"): values, name.replace("weight", "scale"): scale}
        floats[name] = values * scale[:, None]
    found = {
        "llama": (tensors, config),
        "example": (other, renamed | {"architectures": ["ExampleForCausalLM"], "model_type": "example"}),
        "ternary": (ternary, config | {"quantization_config": {"quant_method": "ternary"}}),
        "floats": (floats, config),
    }
    for kind, (stored, settings) in found.items():
        place = directory / kind
        place.mkdir()
        save_file(stored, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(settings))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(directory / name, place / name)
    return directory


@pytest.fixture
def example(packages, site, monkeypatch):
    """The package is installed for this process and those that it starts."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "quire_example"]:
        del sys.modules[name]


def generated(model, **more):
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20} | more
    with LLM(str(model), **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def transformers_tokens(model, text):
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    ids = torch.tensor([Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids])
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    return found[0, ids.shape[1] :].tolist()


def test_the_family_equals_transformers(example, checkpoints):
    assert generated(checkpoints / "example") == [transformers_tokens(checkpoints / "llama", text) for text in PROMPTS]


def test_ternary_matrices_equal_floats_on_one_rank_and_on_two(example, checkpoints):
    expected = [transformers_tokens(checkpoints / "floats", text) for text in PROMPTS]
    assert generated(checkpoints / "ternary") == expected
    assert generated(checkpoints / "ternary", tensor_parallel_size=2) == expected


def test_the_io_processor(example, checkpoints):
    texts = ["lazy dog", "the quick brown fox", "gathering"]
    with LLM(str(checkpoints / "llama"), runner="pooling", io_processor_plugin="nearest", device="cpu") as llm:
        [found] = llm.encode({"data": {"query": "the quick brown fox", "texts": texts}}, use_tqdm=False)
    assert found.outputs["nearest"] == texts[1] and found.outputs["similarity"] == pytest.approx(1.0)


def test_a_server_with_the_package(example, checkpoints):
    flags = ["--distributed-executor-backend", "uni", "--device", "cpu", "--kv-cache-memory-bytes", "4M", "--api-key", "key"]
    expected = transformers_tokens(checkpoints / "llama", PROMPTS[0])
    often = {"QUIRE_LOG_STATS_INTERVAL": "0.2"}
    with serving(checkpoints / "example", *flags, "--require-plugins", **often) as server, server.client() as client:
        assert client.post("/example/shout", json={"prompt": PROMPTS[0]}).status_code == 401
        client.headers["Authorization"] = "Bearer key"
        request = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = client.post("/v1/completions", json=request).json()["choices"][0]
        assert answer["token_ids"] == expected
        only = client.post("/v1/completions", json=request | {"vllm_xargs": {"only": 42}}).json()["choices"][0]
        assert only["token_ids"] == [42] * 8
        assert client.post("/v1/completions", json=request | {"vllm_xargs": {"only": "42"}}).status_code == 400
        shouted = client.post("/example/shout", json={"prompt": PROMPTS[0], "max_tokens": 4}).json()
        plain = client.post("/v1/completions", json=request | {"max_tokens": 4, "ignore_eos": False}).json()
        assert shouted == {"model": "tiny", "text": plain["choices"][0]["text"].upper()}
        tokens = 16 + 2 * plain["usage"]["completion_tokens"]
        wait_for(lambda: " 5 requests finished" in server.log())  # of the stat logger; one was refused
        assert f"engine 0: {tokens} tokens, 5 requests finished" in server.log() and "engine 0 is ready" in server.log()
        refused = client.post("/example/shout", json={"prompt": PROMPTS[0], "max_tokens": 0})
        assert refused.status_code == 400 and "max_tokens" in error_of(refused)["message"]


# what is done to the package, the entry point that breaks, and what its line in the log says
BREAKS = {
    "syntax error": ("family.py", "CARD = (", "model family 'example'", "SyntaxError: '(' was never closed"),
    "raises when imported": ("endpoints.py", "1 / 0", "endpoint 'shout'", "ZeroDivisionError: division by zero"),
    "hangs": ("waits.py", "import time\ntime.sleep(600)", "general plug-in 'waits'", "it has not returned after 0.5 s"),
    "missing dependency": ("quantization.py", "import absent", "quantization method 'ternary'", "No module named 'absent'"),
    "wrong type": ("odd.py", "CARD = 5", "model family 'odd'", "it must be a Card or a tuple of Cards; got int"),
}  # fmt: skip
POINTS = {"waits.py": "[quire.general_plugins]\nwaits = quire_example.waits:wait\n", "odd.py": "odd = quire_example.odd:CARD\n"}
TWICE = "the endpoint 'twice' is offered by other-example 2.0 and quire-example 1.0, so it is not used"


def break_package(site, directory, *ways):
    """Return a copy of the installed package that is broken in these ways."""
    shutil.copytree(site, directory)
    [about] = directory.glob("quire_example-*.dist-info")
    points = (about / "entry_points.txt").read_text()
    for way in ways:
        if way == "two with one name":
            points = points.replace("[quire.endpoints]\n", "[quire.endpoints]\ntwice = quire_example.endpoints:router\n")
            other = directory / "other_example-2.0.dist-info"
            other.mkdir()
            (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-example\nVersion: 2.0\n")
            (other / "entry_points.txt").write_text("[quire.endpoints]\ntwice = quire_example.family:CARD\n")
            continue
        file, code, _, _ = BREAKS[way]
        (directory / "quire_example" / file).write_text(code)
        more = POINTS.get(file, "")
        points = points.replace("[quire.models]\n", f"[quire.models]\n{more}") if file == "odd.py" else f"{more}{points}"
    (about / "entry_points.txt").write_text(points)
    return directory


def path_with(directory):
    return os.pathsep.join([str(directory), os.environ["PYTHONPATH"]])


def test_a_server_with_the_broken_package(packages, site, checkpoints, tmp_path):
    """It serves without them, and names each of them with its package."""
    broken = break_package(site, tmp_path / "broken", *BREAKS, "two with one name")
    environment = {"PYTHONPATH": path_with(broken), "QUIRE_PLUGIN_TIMEOUT": "0.5"}
    with serving(checkpoints / "llama", **environment) as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        assert client.post("/example/shout", json={"prompt": "a"}).status_code == 404
        lines = [line for line in server.lines if "(engine" not in line]
    for _, _, what, reason in BREAKS.values():
        [line] = [line for line in lines if f"the {what} of quire-example 1.0" in line and "is skipped" in line]
        assert reason in line
    assert sum(TWICE in line for line in lines) == 1


def test_the_flag_makes_each_an_error(packages, site, checkpoints, tmp_path):
    started = {}
    for number, way in enumerate([*BREAKS, "two with one name"]):
        broken = break_package(site, tmp_path / str(number), way)
        line = [sys.executable, "-m", "quire.cli.main", "serve", str(checkpoints / "llama"), "--port", "0", "--require-plugins"]
        line += ["--distributed-executor-backend", "fake"]
        environment = {**os.environ, "PYTHONPATH": path_with(broken), "QUIRE_PLUGIN_TIMEOUT": "0.5"}
        started[way] = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment)
    for way, process in started.items():
        told = process.communicate()[1].strip().splitlines()[-1]
        expected = [TWICE] if way not in BREAKS else [f"the {BREAKS[way][2]} of quire-example 1.0", BREAKS[way][3]]
        assert process.returncode == 2 and all(part in told for part in expected), (way, told)
        assert "Repair or uninstall the package, or start without require_plugins" in told


def test_without_the_package(packages, checkpoints):
    assert "ExampleForCausalLM" not in ModelRegistry.get_supported_archs()
    with pytest.raises(Exception, match=r"lacks 'num_hidden_layers'"):
        generated(checkpoints / "example")
