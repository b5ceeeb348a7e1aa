"""system_fingerprint: equal for the same setup, another one wherever the same request might get other tokens."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.args import EngineArgs
from quire.config.resolve import resolve
from quire.device.cpu import device
from quire.device.registry import describe
from quire.serve import server
from quire.serve.server import files_digest, system_fingerprint
from tiny_model import make_model


def fingerprint(directory, gpu="cpu", **args):
    config = resolve(EngineArgs(model=str(directory), device="cpu", **args), lambda: "cpu", describe)
    return system_fingerprint(replace(config, device_facts=replace(config.device_facts, name=gpu)))


def test_answers_carry_the_fingerprint_of_the_engine(server, http):
    told = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["system_fingerprint"]
    assert told == system_fingerprint(server.llm.config) and server.llm.config.device_facts.name == "cpu"


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "bfloat16"},
        {"gpu": "NVIDIA H200"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"hf_overrides": {"rms_norm_eps": 0.1}},
        {"block_size": 32},
        {"override_generation_config": {"temperature": 0.3}},
    ],
    ids=str,
)
def test_a_changed_setup_has_another_fingerprint(serve_model, change):
    assert fingerprint(serve_model) == fingerprint(serve_model, max_num_seqs=3) != fingerprint(serve_model, **change)


def test_another_version_of_torch_has_another_fingerprint(serve_model, monkeypatch):
    before = fingerprint(serve_model)
    monkeypatch.setattr(server, "version", lambda name: f"another {name}")
    assert fingerprint(serve_model) != before


@pytest.mark.parametrize(
    ("name", "other"),
    [("multiplies", lambda: "another answer"), ("cpu_features", lambda: "another CPU"), ("has_openvino", None)],
)
def test_other_kernels_have_another_fingerprint(serve_model, monkeypatch, name, other):
    """x86 CPUs with AVX-512 VNNI run C kernels where others use OpenVINO."""
    monkeypatch.setattr(device, "multiplies", lambda: False)
    monkeypatch.setattr(device, "version", lambda name: "2026.1")
    monkeypatch.setattr(device, "has_openvino", lambda: True)
    before = fingerprint(serve_model)
    monkeypatch.setattr(device, name, other or (lambda: False))
    assert fingerprint(serve_model) != before


def test_changed_weights_at_the_same_path_have_another_fingerprint(tmp_path):
    directory = make_model(tmp_path)
    before = fingerprint(directory)
    [file] = directory.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name, values in weights.items() if values.ndim == 2)
    weights[name] = weights[name] + torch.full_like(weights[name], 0.5)
    save_file(weights, file, metadata={"format": "pt"})
    files_digest.cache_clear()  # as in another server
    assert fingerprint(directory) != before
