"""Adapters that PEFT wrote: beside each other and beside rows without, they make what PEFT makes of them."""

import copy
import json
import zipfile

import pytest
import torch

from adapters import Q_PROJ, halves, open_cache, put, write_adapter, write_with_peft
from oracle import Sequences
from quire.features.lora.cache import LoRACache
from quire.features.lora.packing import adapt
from quire.features.lora.values import largest_of
from quire.layers.lora import LinearBank
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.types.adapter import AdapterRef
from quire.types.errors import AdapterError

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 199, (3, 20), generator=torch.Generator().manual_seed(0)).tolist()
WANTED = [2, 0, 1]  # the places of three rows' adapters
ALL = {"target_modules": "all-linear"}
EXPERTS = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
BOTH_ENDS = {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}
CASES = {
    "llama": (ALL, {"target_modules": r".*\.(1|2)\..*_proj", "use_dora": True}),
    "llama-biases-tied": (ALL | {"bias": "all"}, {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}),
    "llama3-rope": (BOTH_ENDS, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "mistral-window": (
        ALL | {"rank_pattern": {r"layers\.[01]\.self_attn.*": 5}, "alpha_pattern": {"up_proj": 9}},
        {"target_modules": ["k_proj", "gate_proj"], "use_rslora": True},
    ),
    "qwen2": (ALL | {"bias": "lora_only"}, {"target_modules": ["lm_head", "o_proj"], "use_dora": True}),
    "qwen3": (ALL, BOTH_ENDS),
    "phi3": (ALL, {"target_modules": ["qkv_proj"], "use_dora": True}),
    "gemma": (ALL, {"target_modules": ["embed_tokens", "up_proj"]}),
    "gemma2": (ALL, {"target_modules": ["lm_head", "k_proj"]}),
    "gpt-neox": (ALL, {"target_modules": ["query_key_value"], "use_dora": True}),
    "opt": (ALL | {"bias": "lora_only"}, {"target_modules": ["fc1", "out_proj"]}),
    "opt-norms-after-narrow": (ALL, {"target_modules": ["fc2", "project_in", "project_out"]}),
    "gpt2": (ALL | {"fan_in_fan_out": True}, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "mixtral": (EXPERTS, {"target_modules": ["k_proj"]}),
    "gpt-oss": (EXPERTS, ALL),
    "qwen3-moe-some-layers": (EXPERTS, ALL),
}


def run(model):
    sequences = Sequences(model, 3, 20)
    sequences.adapters = WANTED
    first = sequences.step([(row, IDS[row][:12]) for row in range(3)])
    later = sequences.step([(row, IDS[row][12:]) for row in (2, 0, 1)], kept=[1, 8, 0])
    return [first[0], first[1], first[2], later[0], later[1]]


@pytest.mark.parametrize("family", CASES)
@pytest.mark.filterwarnings("ignore")
def test_every_row_has_its_own(checkpoint, tmp_path, family):
    case = checkpoint(family)
    model, cache = open_cache(case)
    expected = [case.reference]
    for slot, config in enumerate(CASES[family], 1):
        directory = tmp_path / str(slot)
        expected.append(write_with_peft(copy.deepcopy(case.reference), directory, slot, r=slot + 2, lora_alpha=7, **config))
        put(cache, directory, slot)
    with torch.inference_mode():
        logits = [expected[WANTED[row]](torch.tensor([IDS[row]])).logits[0].float() for row in range(3)]
    wanted = [*(each[:12] for each in logits), logits[2][-1:], logits[0][12:]]
    for ours, theirs in zip(run(model), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_slots_are_filled_and_emptied(checkpoint, tmp_path):
    case = checkpoint("llama")
    model, cache = open_cache(case)
    paths = [write_adapter(tmp_path / str(seed), halves(Q_PROJ, 48, 48, seed=seed)) for seed in range(2)]

    def answer(slot):
        sequences = Sequences(model, 1, 20)
        sequences.adapters = [slot]
        return sequences.step([(0, IDS[0])])[0]

    put(cache, paths[0], 1)
    first, plain = answer(1), answer(0)
    put(cache, paths[1], 1)
    second = answer(1)
    put(cache, paths[0], 2)
    assert torch.equal(answer(2), first) and torch.equal(answer(1), second) and torch.equal(answer(0), plain)
    assert not torch.equal(first, second) and not torch.equal(first, plain)
    cache.drop(2)
    cache.drop(2)
    assert torch.equal(answer(2), plain) and cache.filled == {1}


def test_positions_that_turn_by_the_longest_context(checkpoint, tmp_path):
    """Of longrope PEFT takes the factors by the prompt at hand, and Quire by the longest there can be: behind the original
    length they are the same."""
    case = checkpoint("phi3-longrope")
    ids = [3 + i * 7 % 190 for i in range(40)]
    theirs = write_with_peft(copy.deepcopy(case.reference), tmp_path, 1, r=2, target_modules="all-linear")
    model, cache = open_cache(case)
    put(cache, tmp_path, 1)
    sequences = Sequences(model, 1, 40)
    sequences.adapters = [1]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(sequences.step([(0, ids)])[0], expected, atol=1e-4, rtol=1e-4)


def test_a_bin_file_and_other_widths(checkpoint, tmp_path):
    case = checkpoint("llama")
    _, cache = open_cache(case)
    found = halves(Q_PROJ, 48, 48)
    path = write_adapter(tmp_path, {name: values.bfloat16() for name, values in found.items()})
    assert cache.read(AdapterRef(1, "a", path)).rank == 2
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(found, tmp_path / "adapter_model.bin")
    assert cache.read(AdapterRef(1, "b", path)).bytes == 2 * 2 * 64 * 4
    for bad, message in (
        (found | {A: found[A].to_sparse()}, "is not stored as plain values"),
        (found | {A: torch.zeros(1, 1).expand(1 << 30, 1 << 30)}, "has more values than its file"),
        (found | {A: found[A].to("meta")}, "is not stored as plain values"),
        (found | {A: torch.tensor(1.0)}, "has rank 0"),
        (found | {A: torch.zeros(0, 48)}, r"lora_A.* has shape \[0, 48\], and no values"),
        ({1: found[A]}, "is not a table of tensors"),
        ([found[A]], "is not a table of tensors"),
        (found | {A.replace("weight", "default.weight"): found[A]}, "occurs twice"),
    ):
        torch.save(bad, tmp_path / "adapter_model.bin")
        with pytest.raises(AdapterError, match=message):
            cache.read(AdapterRef(1, "c", path))
    torch.save(found, tmp_path / "plain.bin")
    bomb = zipfile.ZipFile(tmp_path / "adapter_model.bin", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain, bomb:
        for name in plain.namelist():
            bomb.writestr(name, bytes(1 << 26) if name.endswith("/data/0") else plain.read(name))
    with pytest.raises(
        AdapterError, match=r"adapter_model\.bin has [\d,]+ bytes, and 67,\d{3},\d{3} in it: torch\.save does not"
    ):
        cache.read(AdapterRef(1, "c", path))
    (tmp_path / "adapter_model.bin").write_bytes(b"not a file of torch's")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin cannot be read"):
        cache.read(AdapterRef(1, "c", path))


GOOD = halves(Q_PROJ, 48, 48)
A, B = GOOD
TOKENS = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(3, 48)}
BAD = {
    "r must be an integer": (GOOD, {"r": 0}),
    "lora_alpha must be a number": (GOOD, {"lora_alpha": "x"}),
    "lora_alpha must be a number that a float can hold, got 1000": (GOOD, {"lora_alpha": 10**400}),
    "peft_type is 'LOHA'": (GOOD, {"peft_type": "LOHA"}),
    "layer_replication is": (GOOD, {"layer_replication": [[0, 2]]}),
    "names tokens of the embedding, and there is no embed_tokens.token_adapter": (GOOD, {"trainable_token_indices": [1]}),
    "trainable_token_indices must be token ids": (GOOD, {"trainable_token_indices": {"embed_tokens": [True]}}),
    r"trainable_token_indices must be token ids.* got \[9223372036854775808\]": (GOOD, {"trainable_token_indices": [1 << 63]}),
    "trainable_token_indices has a token twice": (GOOD, {"trainable_token_indices": [4, 5, 4]}),
    "embed_tokens.token_adapter.* that trainable_token_indices does not name": (TOKENS, {}),
    r"embed_tokens.token_adapter.* has shape \[3, 48\], where 2 of trainable_token_indices need \[2, 48\]": (
        TOKENS, {"trainable_token_indices": [4, 5]},
    ),
    "embed_tokens.token_adapter.* has a row of token 199, which the model does not have: it has 199": (
        TOKENS, {"trainable_token_indices": [4, 5, 199]},
    ),
    "init_lora_weights is 'pissa'": (GOOD, {"init_lora_weights": "pissa"}),
    "is not a regular expression": (GOOD, {"rank_pattern": {"(": 3}}),
    "has rank 2, where adapter_config.json has 3": (GOOD, {"r": 3}),
    "has rank 32; max_lora_rank is 16; start with --max-lora-rank 32": (halves(Q_PROJ, 48, 48, rank=32), {"r": 32}),
    rf"{A}.* has shape \[0, 48\], and no values: the rank must be at least 1": (halves(Q_PROJ, 48, 48, rank=0), {}),
    r"has rank 2, where adapter_config.json has 10{199}\.\.\.$": (GOOD, {"r": 10**4000}),
    rf"{A}.* has no lora_B": ({A: GOOD[A]}, {}),
    rf"{B}.* has no lora_A": ({B: GOOD[B]}, {}),
    rf"{A}.* has shape \[2, 47\], where the model needs \[2, 48\]": (GOOD | {A: GOOD[A][:, :47]}, {}),
    rf"{B}.* has shape \[47, 2\]": (GOOD | {B: GOOD[B][:47]}, {}),
    rf"{A}.* has values that are not finite": (GOOD | {A: GOOD[A].index_fill(1, torch.tensor([3]), torch.nan)}, {}),
    rf"{B}.* has values that are not finite": (GOOD | {B: GOOD[B] * torch.inf}, {}),
    rf"{A}.* is stored as int32": (GOOD | {A: GOOD[A].int()}, {}),
    r"layers\.9\..* is for a layer that the model does not have": (halves(Q_PROJ.replace("1", "9"), 48, 48), {}),
    r"wrong_proj.* is for a layer that the model does not have": (halves(Q_PROJ.replace("q_", "wrong_"), 48, 48), {}),
    "is not of a kind that LoRA adapters have": (GOOD | {f"{Q_PROJ}.lora_C": GOOD[A] + 1}, {}),
    "has no lora_magnitude_vector, though use_dora is true": (GOOD, {"use_dora": True}),
    "is a bias for a layer that has none": (GOOD | {f"{Q_PROJ}.bias": torch.ones(48)}, {}),
    r"input_layernorm.weight.* adapters cannot change": (
        {"base_model.model.model.layers.0.input_layernorm.weight": torch.ones(48)}, {},
    ),
    r"q_proj.weight.* is a whole matrix \(modules_to_save\)": ({f"{Q_PROJ}.weight": torch.ones(48, 48)}, {}),
    "has 5 tokens more than the model's 199: added vocabulary needs lora_extra_vocab_size of at least 5": (
        {"base_model.model.lm_head.weight": torch.ones(204, 48)}, {},
    ),
    "no tensors that add anything": ({}, {}),
    rf"{A}.* has a value of 3e\+38: more than 1e\+06 overflows": (GOOD | {A: torch.full_like(GOOD[A], 3e38)}, {}),
    rf"{A}.* and its lora_B add up to .*: more than 1e\+06 overflows": (GOOD, {"lora_alpha": 1e9}),
    "lm_head.* has a value of 1e": ({"base_model.model.lm_head.weight": torch.full((199, 48), 1e30)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_named(bad_cache, tmp_path, message):
    tensors, config = BAD[message]
    with pytest.raises(AdapterError, match=message):
        bad_cache.read(AdapterRef(1, "bad", write_adapter(tmp_path, tensors, **config)))


@pytest.fixture(scope="module")
def bad_cache(checkpoint):
    return open_cache(checkpoint("llama"))[1]


def test_files_that_are_no_adapters(bad_cache, tmp_path):
    path = write_adapter(tmp_path, GOOD)
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    for name, content, message in (
        ("adapter_model.safetensors", whole[:-9], "truncated"),
        ("adapter_model.safetensors", b"12345678", "broken safetensors file"),
        ("adapter_config.json", b"{", "cannot be read as JSON"),
        ("adapter_config.json", b"[]", "must be a JSON object"),
    ):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(AdapterError, match=message):
            bad_cache.read(AdapterRef(1, "bad", path))
        (tmp_path / name).write_bytes(before)
    for missing in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / missing).unlink()
        with pytest.raises(AdapterError, match=missing):
            bad_cache.read(AdapterRef(1, "bad", path))
    for nowhere in (tmp_path / "nowhere", "\0"):
        with pytest.raises(AdapterError):
            bad_cache.read(AdapterRef(1, "bad", str(nowhere)))


def test_experts_one_by_one_and_as_they_once_were(checkpoint, tmp_path):
    """Each expert's matrices by themselves, of different ranks; and all in one, with inputs and outputs the other way round."""
    case = checkpoint("qwen3-moe")
    model, cache = open_cache(case)
    path, merged = "model.layers.1.mlp.experts", copy.deepcopy(case.reference)
    experts = merged.get_submodule(path)
    dice, tensors = torch.Generator().manual_seed(0), {}
    for expert, name, rank in ((0, "gate_proj", 2), (0, "up_proj", 1), (3, "down_proj", 2), (5, "up_proj", 3)):
        outputs, inputs = (48, 24) if name == "down_proj" else (24, 48)
        down, up = torch.randn(rank, inputs, generator=dice), torch.randn(outputs, rank, generator=dice)
        module = f"{path}.{expert}.{name}"
        tensors |= {f"base_model.model.{module}.lora_A.weight": down, f"base_model.model.{module}.lora_B.weight": up}
        weight = experts.down_proj if name == "down_proj" else experts.gate_up_proj
        start = 24 if name == "up_proj" else 0
        weight.data[expert, start : start + outputs] += up @ down * 4 / rank
    ranks = {f"experts.{expert}.{name}": rank for expert, name, rank in ((0, "up_proj", 1), (5, "up_proj", 3))}
    put(cache, write_adapter(tmp_path / "single", tensors, rank_pattern=ranks), 1)

    older = copy.deepcopy(case.reference)
    experts, rank = older.get_submodule(path), 2
    down = torch.randn(6 * rank, 48, generator=dice), torch.randn(48, rank * 6, generator=dice)  # of gate_up_proj [6, 48, 48]
    back = torch.randn(6 * rank, 48, generator=dice), torch.randn(24, rank * 6, generator=dice)  # of down_proj [6, 48, 24]
    for (low, high), weight in ((down, experts.gate_up_proj), (back, experts.down_proj)):
        both = low.view(6, rank, -1), high.view(-1, rank, 6)
        weight.data += torch.einsum("eri,ore->eio", *both) * 2
    prefix = f"base_model.model.{path}"
    tensors = {
        f"{prefix}.lora_A.weight": back[0],
        f"{prefix}.lora_B.weight": back[1],
        f"{prefix}.base_layer.lora_A.weight": down[0],
        f"{prefix}.base_layer.lora_B.weight": down[1],
    }
    put(cache, write_adapter(tmp_path / "older", tensors), 2)
    with torch.inference_mode():
        expected = [each(torch.tensor([IDS[0]])).logits[0] for each in (case.reference, merged, older)]
    for slot in (0, 1, 2):
        sequences = Sequences(model, 1, 20)
        sequences.adapters = [slot]
        torch.testing.assert_close(sequences.step([(0, IDS[0])])[0], expected[slot], atol=2e-5, rtol=2e-5)
    assert len({json.dumps(each.argmax(-1).tolist()) for each in expected}) == 3


def test_what_kernels_read_is_written_without_banks(checkpoint, tmp_path):
    """Until a row with an adapter that kernels do not support is in the batch; the logits stay the same."""
    case = checkpoint("llama")
    model = build_model(case.facts)
    adapters = adapt(model, device=torch.device("cpu"), dtype=torch.float32, tabled=(2, 16))
    load_weights(model, case.facts, device="cpu", dtype="float32")
    cache, table = LoRACache(adapters, model, 2, 16), adapters._table
    parts = [f"base_model.model.model.layers.{layer}" for layer in (0, 2)]
    tensors = halves(f"{parts[0]}.self_attn.k_proj", 16, 48) | halves(f"{parts[0]}.self_attn.q_proj", 48, 48, 2, 1)
    tensors |= halves(f"{parts[1]}.mlp.down_proj", 48, 80, 2, 2)
    put(cache, write_adapter(tmp_path / "low", tensors), 1)
    put(cache, write_adapter(tmp_path / "head", halves("base_model.model.lm_head", 199, 48)), 2)
    assert cache.has_kernels_for([1]) and not any(1 in bank.slots for bank in banks_of(model))
    written = table._rows[1].clone()
    assert (written != 0).sum() == 9
    with torch.inference_mode():
        assert not cache.has_kernels_for([1, 2])
        table.write(1, {site.path for site in adapters.sites.values() if site.kind == "linear" and 1 in site._bank.slots})
        assert torch.equal(table._rows[1], written)
        sequences = Sequences(model, 2, 20)
        sequences.adapters = [1, 2]
        together = sequences.step([(row, IDS[0]) for row in range(2)])[0]
    other, cache = open_cache(case)
    put(cache, tmp_path / "low", 1)
    sequences = Sequences(other, 1, 20)
    sequences.adapters = [1]
    torch.testing.assert_close(together, sequences.step([(0, IDS[0])])[0], atol=2e-5, rtol=2e-5)


EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_"


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        (halves("base_model.model.lm_head", 199, 48), "the LM head"),
        ({f"{EMBEDDING}A": torch.ones(2, 199), f"{EMBEDDING}B": torch.ones(48, 2)}, "the embedding"),
    ],
)
def test_deterministic_refuses_what_kernels_do_not_support(checkpoint, tmp_path, changed, kind):
    case = checkpoint("llama")
    model = build_model(case.facts)
    adapters = adapt(model, device=torch.device("cpu"), dtype=torch.float32, tabled=(2, 16))
    load_weights(model, case.facts, device="cpu", dtype="float32")
    cache, linear = LoRACache(adapters, model, 2, 16), halves(Q_PROJ, 48, 48)
    only = LoRACache(adapters, model, 2, 16, kernels_only=True)
    put(cache, write_adapter(tmp_path / "linear", linear), 1)
    put(cache, write_adapter(tmp_path / "other", linear | changed), 2)
    put(only, tmp_path / "linear", 1)
    with pytest.raises(AdapterError, match=f"supports adapters of linear layers only on a GPU; this one changes {kind}"):
        put(only, tmp_path / "other", 2)


def banks_of(model):
    return [layer.bank for layer in model.modules() if isinstance(getattr(layer, "bank", None), LinearBank)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_largest(kind):
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(kind)
    assert largest_of(values) == float(values.abs().max()) and largest_of(values.t()) == largest_of(-values)
    assert largest_of(values[:0]) == 0.0 == largest_of(torch.zeros(3, dtype=kind)) == largest_of(-torch.zeros(3, dtype=kind))
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        assert largest_of(values.index_fill(0, torch.tensor([3]), bad)) == torch.inf
