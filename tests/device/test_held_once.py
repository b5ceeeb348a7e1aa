"""A matrix that embeds tokens and makes logits is not held twice by a CPU that packs its heads."""

from copy import deepcopy

import gguf
import numpy as np
import pytest
import torch

from gguf_files import LLAMA, llama_tensors, tiny_llama
from oracle import Sequences, open_checkpoint
from quire.attn.batch import PLAIN
from quire.config.facts import read_facts
from quire.device.cpu.device import CPUDevice, has_openvino
from quire.device.cpu.graph import Runtime
from quire.files.resolve import resolve_model
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.ops.native import multiplies_floats
from quire.runner.settings import RunnerSettings
from quire.runner.step import Runner
from quire.types.cache import CacheLayout

RUNTIMES = [*([Runtime.OPENVINO] if has_openvino() else []), *([Runtime.OWN] if multiplies_floats() else [])]
IDS = [3, 17, 42, 8, 30, 11, 25]


@pytest.fixture(params=RUNTIMES, autouse=True)
def runtime(request, monkeypatch):
    monkeypatch.setattr("quire.device.cpu.prepare.runtime_for_floats", lambda: request.param)


def run_by_runtime(facts):
    layout = CacheLayout(4, 0, 0, ())
    runner = Runner(facts, RunnerSettings("float32", max_seqs=1, max_batched_tokens=8), layout, device=CPUDevice())
    runner.load()
    return runner._model


def logits(model):
    with torch.inference_mode():
        return Sequences(model, 1, len(IDS)).step([(0, IDS)])[0]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_safetensors(checkpoint, tmp_path, kind):
    deepcopy(checkpoint("llama-biases-tied").reference).to(kind).save_pretrained(tmp_path)
    saved = open_checkpoint(tmp_path)
    model = run_by_runtime(saved.facts)
    assert model.embed_tokens.weight is None
    table = saved.model.embed_tokens.weight
    assert torch.equal(model.embed_tokens(torch.arange(len(table)), PLAIN), table)
    torch.testing.assert_close(logits(model), saved.expected(IDS), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_rows_of_gguf(tmp_path, kind):
    tensors, type_ = llama_tensors(LLAMA), gguf.GGMLQuantizationType[kind]
    table = tensors["token_embd.weight"].astype(np.float32)
    stored = table.astype(np.float16) if kind == "F16" else (gguf.quants.quantize(table, type_), type_)
    tensors = {name: values for name, values in tensors.items() if name != "output.weight"}
    path = tiny_llama(tmp_path / "tied.gguf", tensors={**tensors, "token_embd.weight": stored})
    facts = read_facts(resolve_model(str(path)), {})
    model, whole = run_by_runtime(facts), build_model(facts)
    load_weights(whole, facts, device="cpu", dtype="float32")
    assert model.embed_tokens.weight is None and whole.lm_head.tied is not None
    ids = torch.arange(len(whole.embed_tokens.weight))
    assert torch.equal(model.embed_tokens(ids, PLAIN), whole.embed_tokens(ids, PLAIN))
    found, expected = logits(model), logits(whole)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_a_matrix_of_its_own_stays(checkpoint):
    model = run_by_runtime(checkpoint("llama").facts)
    assert model.lm_head.tied is None and model.embed_tokens.weight is not None
