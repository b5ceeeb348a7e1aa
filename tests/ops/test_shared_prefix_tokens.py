"""A whole engine on the Triton backend: requests with common prefixes give the tokens of the reference backend."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.attn import triton as backend
from quire.attn import work_split
from quire.runner import core
from quire.runner.slots import Prefixes
from tiny_model import make_model

pytest.importorskip("triton")

HEADS = [list(range(2, 72)), list(range(100, 140)), list(range(2, 72)) + list(range(200, 230))]


def generate(directory):
    prompts = [[*HEADS[index % 3], 240 + index, 250 - index] for index in range(12)] + [[5, 6, 7]]
    llm = LLM(
        str(directory), device="cpu", dtype="float32", block_size=4, max_num_seqs=16, max_num_batched_tokens=160,
        kv_cache_memory_bytes=4 << 20, enforce_eager=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_tokens_of_requests_with_common_prefixes(tmp_path, monkeypatch):
    directory = make_model(tmp_path)
    expected = generate(directory)
    found, find = [], Prefixes._find

    def watched(*given):
        found.append(find(*given))
        return found[-1]

    monkeypatch.setattr(work_split, "SPLIT", 32)
    monkeypatch.setattr(core, "can_divide", lambda *given: False)  # page by page, as on a GPU
    monkeypatch.setattr(backend.TritonAttention, "refuse", lambda *given: [])
    monkeypatch.setattr(Prefixes, "_find", watched)
    assert generate(directory) == expected
    assert max(alike.common.max(initial=0) for alike in found) == 3
