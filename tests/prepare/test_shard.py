"""The ranks of a divided model, in step with each other in threads of one process, give the whole model's logits."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from lockstep import GPULockstep, Lockstep, Member, divided, together
from safetensors.torch import load_file, save_file

import selection
from family import Family
from gguf_files import LLAMA, llama_tensors, tiny_llama
from more_families import MORE
from oracle import FAMILIES, Sequences, in_pieces, make_checkpoint, open_checkpoint
from quire.config.facts import read_facts
from quire.device.cpu.prepare import CompiledBody, compile_body
from quire.device.cuda import group as group_of_gpus
from quire.dist.mesh import HeadDivision, Position, evenly, largest_state, share_state
from quire.files.resolve import resolve_model
from quire.layers.embedding import Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.quant.gguf import GGUFHead, GGUFMethod, GGUFRows
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.ops.blocks import dequantize
from quire.prepare.shard import shard
from quire.types.errors import ConfigError
from recurrent_families import RECURRENT

FEW = [3, 17, 42, 8, 30, 11, 25]
IDS = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", [*sorted({*FAMILIES} - {*MORE}), *selection.select(sorted(MORE), MORE, 8, 4)])
def test_two_halves_are_the_whole(checkpoint, family):
    case = checkpoint(family)
    models, group = divided(case.facts, 2)
    for logits, ids in zip(together(models, lambda model: in_pieces(model, *IDS)), IDS, strict=True):
        close(logits, case.expected(ids))
    ours = [module for module in models[0].modules() if isinstance(getattr(module, "group", None), Member)]
    adding = [module for module in ours if not isinstance(module, Head)]
    # Llama 4 runs its experts once for each choice of a token
    again = sum(isinstance(module, Experts) for module in adding) if family == "llama4-two-experts" else 0
    assert group.sums == 6 * (len(adding) + again)
    if family not in MORE:  # the embedding, and each half of a block
        assert len(adding) == 1 + 2 * len(case.facts.layers)
    held = [sum(weight.numel() for weight in model.parameters()) for model in (*models, case.model)]
    assert max(held[:2]) < 0.75 * held[2]


RECURRENT_KINDS = (
    "bamba",
    "falcon-h1-no-norm",
    "jamba",
    "kimi-linear",
    "lfm2",
    "minimax",
    "olmo-hybrid",
    "qwen3-next",
    "zamba2",
)


@pytest.mark.parametrize("family", RECURRENT_KINDS)
def test_two_halves_of_recurrent_layers(checkpoint, family):
    """All their matrices and states are divided: all ranks together hold little more than one process."""
    case = checkpoint(family)
    models, _ = divided(case.facts, 2)
    for logits, ids in zip(together(models, lambda model: in_pieces(model, *IDS)), IDS, strict=True):
        torch.testing.assert_close(logits, case.expected(ids), atol=3e-4, rtol=1e-3)
    held = [sum(weight.numel() for weight in model.parameters()) for model in (*models, case.model)]
    assert max(held[:2]) < 0.57 * held[2]
    states = [sum(layer.cache.bytes(4) for layer in model.recurrents) for model in (*models, case.model)]
    assert states[0] == states[1] == states[2] / 2 == sum(largest_state(state, 2, 4) for state in case.facts.states)


# groups of B and C, or key heads, on several ranks; heads and channels that are not divided evenly
@pytest.mark.parametrize(
    ("family", "size"),
    [("mamba2", 3), ("falcon-h1", 4), ("qwen3-next", 4), ("olmo-hybrid", 3), ("kimi-linear", 3), ("mamba", 5), ("lfm2", 5)],
)
def test_uneven_shares_of_recurrent_layers(checkpoint, family, size):
    case = checkpoint(family)
    models, _ = divided(case.facts, size)
    for logits, ids in zip(together(models, lambda model: in_pieces(model, *IDS)), IDS, strict=True):
        torch.testing.assert_close(logits, case.expected(ids), atol=3e-4, rtol=1e-3)
    for rank, model in enumerate(models):
        assert [layer.cache for layer in model.recurrents] == [
            share_state(state, Position(rank, size)) for state in case.facts.states
        ]
    largest = max(sum(layer.cache.bytes(2) for layer in model.recurrents) for model in models)
    assert largest == sum(largest_state(state, size, 2) for state in case.facts.states)


MANY_HEADS = {"num_attention_heads": 8, "head_dim": 8, "intermediate_size": 72, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("keys", [2, 8])
@pytest.mark.parametrize("size", [3, 5, 7])
def test_shares_that_are_not_alike(tmp_path, size, keys):
    """Key heads fewer than ranks, and more."""
    make_checkpoint(Family("LlamaConfig", "LlamaForCausalLM", MANY_HEADS | {"num_key_value_heads": keys}), tmp_path)
    case = open_checkpoint(tmp_path)
    models, _ = divided(case.facts, size)
    assert len({attention.spec.heads for model in models for attention in model.attentions}) == 2
    [logits] = together(models, lambda model: Sequences(model, 1, 40).step([(0, IDS[0])]))
    close(logits, case.expected(IDS[0]))


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "gpt-oss", "mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v2", "falcon"]
)
def test_eight_ranks(tmp_path, family):
    """All make the same calls in the same order (`lockstep.py`)."""
    known = FAMILIES[family]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if "deepseek" in family else 2, "intermediate_size": 72}
    make_checkpoint(replace(known, settings=known.settings | heads), tmp_path)
    case = open_checkpoint(tmp_path)
    models, group = divided(case.facts, 8)
    for logits, ids in zip(together(models, lambda model: in_pieces(model, *IDS)), IDS, strict=True):
        close(logits, case.expected(ids))
    assert group.sums


@pytest.mark.parametrize(("size", "family"), [(2, "qwen3"), (3, "gpt-oss"), (5, "mixtral"), (8, "qwen3"), (8, "deepseek-v3")])
def test_collectives_of_gpus(tmp_path, monkeypatch, size, family):
    """One-shot collectives and NCCL, by size: every rank makes the same calls with the same sizes, and the bits are those of
    sums in rank order."""
    monkeypatch.setattr(group_of_gpus, "one_shot_limit", lambda ranks: 2048)
    known = FAMILIES[family]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if "deepseek" in family else 2, "intermediate_size": 72}
    make_checkpoint(replace(known, settings=known.settings | heads), tmp_path)
    case = open_checkpoint(tmp_path)
    models, group = divided(case.facts, size, kind=GPULockstep)
    in_order, _ = divided(case.facts, size)
    for played, expected in zip(
        *(together(each, lambda model: in_pieces(model, *IDS)) for each in (models, in_order)), strict=True
    ):
        assert torch.equal(played, expected)
    assert all(group.calls[call] > size for call in ("one-shot", "all-to-all", "all-gather")), group.calls


EIGHT_RECURRENT_HEADS = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 12},
    "falcon-h1": {"mamba_n_heads": 8, "mamba_d_head": 12},
    "mamba2": {"num_heads": 8, "head_dim": 12},
    "nemotron-h": {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 8},
    "jamba": {},
    "qwen3-next": {"linear_num_value_heads": 16},
    "qwen3.5": {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
    "olmo-hybrid": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "kimi-linear": {"linear_num_heads": 8},
    "lfm2": {},
    "minimax": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
}
ATTENTION_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 72}


@pytest.mark.parametrize("family", EIGHT_RECURRENT_HEADS)
def test_eight_ranks_of_recurrent_layers(tmp_path, family):
    """All make the same calls in the same order, those in recurrent layers included."""
    known = RECURRENT[family]
    attention = {} if known.settings.get("num_attention_heads", 0) is None else ATTENTION_HEADS
    make_checkpoint(replace(known, settings=known.settings | attention | EIGHT_RECURRENT_HEADS[family]), tmp_path)
    case = open_checkpoint(tmp_path)
    models, group = divided(case.facts, 8)
    [logits] = together(models, lambda model: Sequences(model, 1, 40).step([(0, IDS[0])]))
    torch.testing.assert_close(logits, case.expected(IDS[0]), atol=3e-4, rtol=1e-3)
    ours = [module for module in models[0].modules() if isinstance(getattr(module, "group", None), Member)]
    assert group.sums == len([module for module in ours if not isinstance(module, Head)])


@pytest.mark.parametrize(("family", "size"), [("mixtral", 2), ("mixtral", 5), ("qwen3-moe", 4), ("gpt-oss", 3)])
def test_whole_experts(checkpoint, family, size):
    case = checkpoint(family)
    models, _ = divided(case.facts, size, expert_parallel=True)
    [logits] = together(models, lambda model: Sequences(model, 1, 40).step([(0, IDS[0])]))
    close(logits, case.expected(IDS[0]))


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor(checkpoint, tmp_path, transposed, expert_parallel):
    plain = checkpoint("qwen3-moe")
    tensors = {name: t for name, t in load_file(plain.directory / "model.safetensors").items() if ".experts." not in name}
    stacks = {name: stack for name, stack in plain.reference.state_dict().items() if ".experts." in name}
    stacks = {name: stack.transpose(1, 2).contiguous() if transposed else stack.clone() for name, stack in stacks.items()}
    save_file(tensors | stacks, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((plain.directory / "config.json").read_text())
    models, _ = divided(read_facts(resolve_model(tmp_path)), 3, expert_parallel)
    [logits] = together(models, lambda model: Sequences(model, 1, 40).step([(0, IDS[0])]))
    close(logits, plain.expected(IDS[0]))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """Of 4 heads with 16 components, in Q4_1 and, in one merged matrix, Q8_0 beside it."""
    fields = {**LLAMA, "embedding_length": 64, "rope.dimension_count": 16}
    tensors = {}
    for name, values in llama_tensors(fields).items():
        kind = gguf.GGMLQuantizationType["Q8_0" if "attn_v" in name else "Q4_1"]
        tensors[name] = (gguf.quants.quantize(values * np.float32(0.2), kind), kind) if values.ndim == 2 else values
    path = tiny_llama(tmp_path_factory.mktemp("blocks") / "tiny.gguf", fields=fields, tensors=tensors)
    return read_facts(resolve_model(str(path)))


def whole_logits(facts, ids, **options):
    model = build_model(facts)
    load_weights(model, facts, device="cpu", dtype="float32", **options)
    return Sequences(model, 1, len(ids)).step([(0, ids)])[0]


@pytest.mark.parametrize("size", [2, 3])
def test_slices_of_blocks_become_floats(blocks, size):
    models, _ = divided(blocks, size)
    [logits] = together(models, lambda model: Sequences(model, 1, len(FEW)).step([(0, FEW)]))
    torch.testing.assert_close(logits, whole_logits(blocks, FEW), atol=1e-4, rtol=1e-4)


def dequantized(method):
    return torch.cat([dequantize(part.read(0, len(part)).flatten(), part.type, (-1, part.columns)) for part in method.parts])


@pytest.mark.parametrize("size", [2, 3])
def test_blocks_stay_in_blocks_where_shares_are_whole_ones(blocks, size):
    """Of three ranks, which have 2, 1 and 1 heads of 16, two cannot keep their columns of the attention's output matrix."""
    kept, floats = divided(blocks, size, keep_quantized=True)[0], divided(blocks, size)[0]
    for model, exact in zip(kept, floats, strict=True):
        assert isinstance(model.lm_head.method, GGUFHead) and isinstance(model.embed_tokens.method, GGUFRows)
        assert torch.equal(
            model.embed_tokens.method.look_up(model.embed_tokens, torch.arange(16)), exact.embed_tokens.weight[:16]
        )
        for path, layer in model.named_modules():
            if isinstance(layer, Linear):
                whole = all(edge % 32 == 0 for edge in (layer.local_inputs.start, layer.local_inputs.stop))
                assert isinstance(layer.method, GGUFMethod) == whole
                values = dequantized(layer.method) if whole else layer.weight
                assert torch.equal(values, exact.get_submodule(path).weight)
    [logits] = together(kept, lambda model: Sequences(model, 1, len(FEW)).step([(0, FEW)]))
    expected = whole_logits(blocks, FEW)
    assert (logits - expected).norm() < 0.05 * expected.norm()  # each product is off by about 0.6 %


def test_random_weights_of_ranks_are_slices_of_the_whole_models(checkpoint):
    facts = checkpoint("phi3").facts
    models, _ = divided(facts, 3, load_format="dummy", seed=5)
    [logits] = together(models, lambda model: Sequences(model, 1, 40).step([(0, IDS[0])]))
    close(logits, whole_logits(facts, IDS[0], load_format="dummy", seed=5))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_shares_meet_where_layers_do(checkpoint, family):
    case = checkpoint(family)
    models, group = divided(case.facts, 2)
    for model in models:
        compiled = compile_body(model.run_blocks, case.facts.hidden_size, whole=True, paged=False)
        if compiled is None:
            pytest.skip("nothing is compiled on this CPU")
        model.body = CompiledBody(model.run_blocks, compiled)
    for logits, ids in zip(together(models, lambda model: in_pieces(model, *IDS)), IDS, strict=True):
        close(logits, case.expected(ids))
    assert group.sums == 6 * (1 + 2 * len(case.facts.layers))
    [few] = together(models, lambda model: Sequences(model, 1, 40).step([(0, IDS[0])], kept=[2]))
    close(few, case.expected(IDS[0])[-2:])


def test_one_rank_has_all_of_it(checkpoint):
    case = checkpoint("gpt2")
    model = build_model(case.facts)
    shard(model, Position(0, 1), None)
    load_weights(model, case.facts, device="cpu", dtype="float32")
    assert torch.equal(*(Sequences(m, 1, 40).step([(0, IDS[0])])[0] for m in (model, case.model)))


def test_more_ranks_than_heads(checkpoint):
    with pytest.raises(ConfigError, match="6 attention heads cannot be divided among 7 ranks"):
        shard(build_model(checkpoint("llama").facts), Position(0, 7), Lockstep(7).of(0))


def test_models_of_transformers_are_not_divided(checkpoint):
    with pytest.raises(ConfigError, match="a model family of Quire's own"):
        shard(build_model(checkpoint("llama").facts, "transformers"), Position(0, 2), Lockstep(2).of(0))


@pytest.mark.parametrize(("queries", "keys"), [(6, 2), (8, 8), (8, 1), (9, 3), (32, 8), (14, 2), (64, 4)])
def test_every_head_is_somewhere_with_its_key_head(queries, keys):
    for size in range(1, min(queries, 8) + 1):
        shares = [HeadDivision(queries, keys, 16).share(Position(rank, size)) for rank in range(size)]
        assert [head for own, _ in shares for head in own] == list(range(queries))
        for own, its_keys in shares:
            assert len(own) % len(its_keys) == 0
            group = len(own) // len(its_keys)
            for i, head in enumerate(own):
                assert its_keys[i // group] == head // (queries // keys)
        if size <= keys:
            assert sum(len(its_keys) for _, its_keys in shares) == keys  # none is held twice


@pytest.mark.parametrize("count", [72, 199, 11008, 14336, 151936, 768])
def test_shares_follow_each_other_and_are_nearly_alike(count):
    for size in range(1, 9):
        shares = [evenly(count)(Position(rank, size)) for rank in range(size)]
        assert [edge for share in shares for edge in (share.start, share.stop)][1:-1:2] == [share.start for share in shares][1:]
        assert (shares[0].start, shares[-1].stop) == (0, count)
        assert max(map(len, shares)) - min(map(len, shares)) <= max(1, count / size / 8)
    assert evenly(14336)(Position(1, 3)).start % 256 == 0


@pytest.mark.parametrize(
    ("count", "grain", "lengths"),
    [
        (256, 32, [64, 96, 96]),
        (192, 64, [64, 128]),
        (192, 64, [64, 64, 64]),
        (11008, 128, [1280, 1408, 1408, 1408, 1280, 1408, 1408, 1408]),
        (768, 128, [128, 256, 128, 256]),
        (192, 128, [128, 64]),  # a block that is less
        (14336, 128, [4608, 4864, 4864]),  # they are many: grains of 256, as without
        (96, 64, [32, 32, 32]),  # two for three ranks: as without
        (64, 1 << 40, [32, 32]),
    ],
)
def test_groups_stay_together_where_there_are_enough(count, grain, lengths):
    shares = [evenly(count)(Position(rank, len(lengths), grain=grain)) for rank in range(len(lengths))]
    assert list(map(len, shares)) == lengths
    assert [number for share in shares for number in share] == list(range(count))
