"""Rows with different adapters get, beside each other, what transformers makes of matrices with the additions in them."""

import copy

import pytest
import torch
from lockstep import divided, together

from oracle import Sequences, in_pieces
from quire.attn import latent_triton
from quire.attn.batch import LoRATokens
from quire.features.lora.packing import adapt
from quire.features.lora.sites import Addition
from quire.layers.lora import LinearBank, LinearLoRA, LowRank
from quire.load.assign import rename
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.types.errors import ConfigError

IDS = torch.randint(3, 199, (3, 20), generator=torch.Generator().manual_seed(0)).tolist()
FAMILIES = ["llama-biases-tied", "phi3", "gpt2", "gemma2", "opt", "opt-norms-after-narrow", "qwen3-moe-some-layers", "gpt-neox",
            "glm4-moe", "deepseek-v3", "bamba", "qwen3.5", "jamba", "lfm2", "kimi-linear"]  # fmt: skip
WANTED = [2, 0, 1]  # the adapters of three rows


def additions(case, sites, number, dora=False):
    """To every other matrix, of a rank of its own, and what becomes of transformers' model with them."""
    merged = copy.deepcopy(case.reference)
    random = torch.Generator().manual_seed(number)
    found = {}
    for name, weight in merged.named_parameters():
        path = (rename(name, case.model.renames) or "").removesuffix(".weight")
        if (
            path not in sites
            or sites[path].kind not in ("linear", "latent")
            or (len(found) % 2 == number % 2 and "layers.1" in path)
        ):
            continue
        outputs, inputs = sites[path].shapes[path]
        rank = 1 + len(found) % 3
        up, down = (torch.randn(shape, generator=random) * 0.3 for shape in ((outputs, rank), (rank, inputs)))
        magnitude = torch.rand(outputs, generator=random) + 1 if dora else None
        found[path] = Addition(down, up, magnitude)
        across = weight.shape != (outputs, inputs) or "c_" in name
        total = (weight.data.t() if across else weight.data) + up @ down
        if magnitude is not None:
            total = total * (magnitude / total.norm(dim=1))[:, None]
        weight.data = total.t().contiguous() if across else total
    assert len(found) >= len(case.facts.layers)
    return found, merged


def room(model, tabled=None):
    return adapt(model, device=torch.device("cpu"), dtype=torch.float32, tabled=tabled)


def adapted(case, model, dora=False, tabled=None):
    adapters = room(model, tabled)
    merged, packed = [case.reference], []
    for number in (1, 2):
        found, reference = additions(case, adapters.sites, number, dora)
        packed.append(adapters.pack(found))
        assert packed[-1].flat.nbytes <= adapters.bytes_of(3)
        merged.append(reference)
    model.put_all = lambda: [adapters.put(place, each) for place, each in enumerate(packed, 1)]
    return adapters, merged


def run(model, tiled=False):
    model.put_all()
    sequences = Sequences(model, 3, 20)
    sequences.tiled = tiled
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are for the GPU then: tests/engine/test_adapters_gpu.py")
@pytest.mark.parametrize(("family", "dora"), [("llama-biases-tied", True), ("phi3", False)])
def test_kernels_add_the_same(checkpoint, family, dora):
    pytest.importorskip("triton")
    case = checkpoint(family)
    model = build_model(case.facts)
    adapters, merged = adapted(case, model, dora, tabled=(2, 3))
    load_weights(model, case.facts, device="cpu", dtype="float32")
    check(run(model, tiled=True), merged)
    assert adapters.has_kernels_for([1, 2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are for the GPU then: tests/engine/test_adapters_gpu.py")
def test_kernels_of_latents_beside_adapters_that_others_do_not_know(checkpoint, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(latent_triton, "LONG_ROW_TOKENS", 10)
    monkeypatch.setattr(latent_triton, "refuse_without_triton", lambda *_: [])
    case = checkpoint("deepseek-v3")
    model = build_model(case.facts)
    adapters, merged = adapted(case, model, tabled=(2, 3))
    load_weights(model, case.facts, device="cpu", dtype="float32")
    model.put_all()
    adapters._table.unusual.add(1)
    assert not adapters.has_kernels_for([1, 2])
    model.put_all = lambda: None
    check(run(model), merged)
    assert any("triton" in type(layer.backend).__module__ for layer in model.attentions)


@pytest.mark.parametrize(
    ("family", "dora"), [("llama-biases-tied", False), ("llama-biases-tied", True), ("phi3", False), ("gpt2", True)]
)
def test_a_rank_adds_its_share(checkpoint, family, dora):
    case = checkpoint(family)
    models, _ = divided(case.facts, 3)
    merged, *_ = [adapted(case, model, dora)[1] for model in models]
    check(together(models, run), merged)


def test_without_an_adapter_nothing_changes(checkpoint):
    case = checkpoint("llama")
    model = build_model(case.facts)
    adapters, _ = adapted(case, model)
    load_weights(model, case.facts, device="cpu", dtype="float32")
    model.put_all()
    for ours, theirs in zip(*(in_pieces(m, IDS[0] * 2, IDS[1] * 2) for m in (model, case.model)), strict=True):
        assert torch.equal(ours, theirs)
    adapters.drop(2)
    runs = [Sequences(model, 1, 20) for _ in range(2)]
    runs[0].adapters = [2]
    assert torch.equal(*(run.step([(0, IDS[0])])[0] for run in runs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 8, 33])
@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_added_to_a_row_depends_on_no_other(dtype, rank, stacked):
    dice = torch.Generator().manual_seed(rank)
    bank = LinearBank()
    for place in (1, 2):
        down, up = (torch.randn(shape, generator=dice).to(dtype) for shape in ((96, rank), (rank, 80)))
        bank.slots[place] = LinearLoRA((LowRank(16, down, up),), stacked=down if stacked else None)
    x, out = (torch.randn(70, columns, generator=dice).to(dtype) for columns in (96, 96))
    places = torch.randint(0, 4, (70,), generator=dice).clamp(max=2)
    places[:3] = 0

    def add(rows):
        return bank.add(out[rows].clone(), x[rows], LoRATokens(places[rows].numpy(), torch.device("cpu")), None)

    together = add(torch.arange(70))
    for row in range(70):
        assert torch.equal(add(torch.tensor([row]))[0], together[row]), row
    assert torch.equal(together[places == 0], out[places == 0])
    some = torch.randperm(70, generator=dice)[:37]
    assert torch.equal(add(some), together[some])


def test_models_without_layers_of_ours_have_no_room(checkpoint):
    with pytest.raises(ConfigError, match="a model of a family of our own"):
        room(build_model(checkpoint("llama").facts, "transformers"))
