"""Every family's logits, position by position, against transformers."""

import copy

import pytest
import torch
from kept_tokens import check_kept_tokens

from family import Family
from oracle import FAMILIES, Sequences, in_pieces, make_checkpoint, open_checkpoint
from quire.load.load import load_weights
from quire.models.registry import build_model

IDS = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompt(checkpoint, family):
    case = checkpoint(family)
    close(Sequences(case.model, 1, 40).step([(0, IDS[0])])[0], case.expected(IDS[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_single_tokens_of_two_rows(checkpoint, family):
    case = checkpoint(family)
    for logits, ids in zip(in_pieces(case.model, *IDS), IDS, strict=True):
        close(logits, case.expected(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_of_some_tokens_all_is_worked_out(checkpoint, family):
    check_kept_tokens(checkpoint(family))


def test_squared_relu(tmp_path):
    make_checkpoint(Family("LlamaConfig", "LlamaForCausalLM", {"hidden_act": "relu2"}), tmp_path)
    case = open_checkpoint(tmp_path)
    close(Sequences(case.model, 1, 40).step([(0, IDS[0])])[0], case.expected(IDS[0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_short_types_stay_as_near_as_transformers_does(checkpoint, family, dtype):
    case = checkpoint(family)
    exact = case.expected(IDS[0])
    model = build_model(case.facts)
    load_weights(model, case.facts, device="cpu", dtype=dtype)
    error = (Sequences(model, 1, 40).step([(0, IDS[0])])[0] - exact).abs().mean()
    reference = copy.deepcopy(case.reference).to(getattr(torch, dtype))
    theirs = (reference(torch.tensor([IDS[0]])).logits[0].float() - exact).abs().mean()
    assert error < 1.2 * theirs
