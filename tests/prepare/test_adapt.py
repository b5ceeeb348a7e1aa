"""Rows with different adapters get, beside each other, what transformers makes of matrices with the additions in them."""

import copy

import pytest
import torch
from lockstep import divided, together

from oracle import Sequences, in_pieces
from quire.device.cpu.compiled import compile_body
from quire.load.assign import rename
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.prepare.adapt import LowRank, adapt
from quire.types.errors import ModelError

IDS = torch.randint(3, 199, (3, 20), generator=torch.Generator().manual_seed(0)).tolist()
FAMILIES = ["llama-biases-tied", "phi3", "gpt2", "gemma2", "opt", "opt-norms-after-narrow", "qwen3-moe-some-layers"]
WANTED = [2, 0, 1]  # the adapters of three rows


def additions(case, places, number):
    """To every other matrix, of a rank of its own, and what becomes of transformers' model with them."""
    merged = copy.deepcopy(case.reference)
    random = torch.Generator().manual_seed(number)
    found = {}
    for name, weight in merged.named_parameters():
        path = (rename(name, case.model.renames) or "").removesuffix(".weight")
        if path not in places or (len(found) % 2 == number % 2 and "layers.1" in path):
            continue
        outputs, inputs = places[path].shape
        rank = 1 + len(found) % 3
        up, down = (torch.randn(shape, generator=random) * 0.3 for shape in ((outputs, rank), (rank, inputs)))
        found[path] = LowRank(down, up)
        product = up @ down
        weight.data += product if weight.shape == product.shape and "c_" not in name else product.t()
    assert len(found) >= len(case.facts.layers)
    return found, merged


def adapted(case, model):
    adapters = adapt(model, 2, 4, device=torch.device("cpu"), dtype=torch.float32)
    merged = [case.reference]
    for number in (1, 2):
        found, reference = additions(case, adapters._places, number)
        adapters.put(number, found)
        merged.append(reference)
    return adapters, merged


def run(model):
    sequences = Sequences(model, 3, 20)
    sequences.adapters = WANTED
    first = sequences.step([(row, IDS[row][:12]) for row in range(3)])
    later = sequences.step([(row, IDS[row][12:]) for row in (2, 0, 1)], kept=[1, 8, 0])
    return [first[0], first[1], first[2], later[0], later[1]]


def check(found, merged):
    with torch.inference_mode():
        expected = [merged[WANTED[row]](torch.tensor([IDS[row]])).logits[0].float() for row in range(3)]
    for ours, theirs in zip(found, [*(e[:12] for e in expected), expected[2][-1:], expected[0][12:]], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_has_its_own_adapter(checkpoint, family):
    case = checkpoint(family)
    model = build_model(case.facts)
    _, merged = adapted(case, model)
    load_weights(model, case.facts, device="cpu", dtype="float32")
    check(run(model), merged)


@pytest.mark.parametrize("family", ["llama-biases-tied", "phi3", "gpt2"])
def test_a_rank_adds_its_share(checkpoint, family):
    case = checkpoint(family)
    models, _ = divided(case.facts, 3)
    merged, *_ = [adapted(case, model)[1] for model in models]
    check(together(models, run), merged)


def test_without_an_adapter_nothing_changes(checkpoint):
    case = checkpoint("llama")
    model = build_model(case.facts)
    adapters, _ = adapted(case, model)
    load_weights(model, case.facts, device="cpu", dtype="float32")
    for ours, theirs in zip(*(in_pieces(m, IDS[0] * 2, IDS[1] * 2) for m in (model, case.model)), strict=True):
        assert torch.equal(ours, theirs)
    adapters.remove(2)
    runs = [Sequences(model, 1, 20) for _ in range(2)]
    runs[0].adapters = [2]
    assert torch.equal(*(run.step([(0, IDS[0])])[0] for run in runs))


def test_what_does_not_fit_is_named(checkpoint):
    model = build_model(checkpoint("qwen3-moe").facts)
    adapters = adapt(model, 1, 4, device=torch.device("cpu"), dtype=torch.float32)
    q_proj, good = "layers.0.self_attn.q_proj", LowRank(torch.ones(4, 48), torch.ones(96, 4))
    adapters.put(1, {q_proj: good})
    for number, found, message in (
        (2, {q_proj: good}, "room for 1 adapters"),
        (1, {"layers.0.mlp.gate": good}, "'layers.0.mlp.gate' is not a matrix"),
        (1, {q_proj: LowRank(torch.ones(4, 47), torch.ones(96, 4))}, "96 x 4 times 4 x 47, the matrix 96 x 48"),
        (1, {q_proj: LowRank(torch.ones(5, 48), torch.ones(96, 5))}, "rank 5; there is room for 4"),
    ):
        with pytest.raises(ModelError, match=message):
            adapters.put(number, found)
    assert compile_body(model.run_blocks, 48, whole=True, paged=False) is None  # a compiled body knows no rows
