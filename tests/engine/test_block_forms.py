"""GGUF files on a device that multiplies by forms: the values of the file, whole models in mixed types, experts, ranks."""

import gguf
import numpy as np
import pytest
import torch

from gguf_files import LLAMA, llama_tensors, tiny_llama, write_gguf
from oracle import Sequences, in_pieces
from quire.config.dequantized_copies import copied_gguf_values
from quire.config.devices import KEEPS
from quire.config.facts import read_facts
from quire.config.memory import packed_weight_bytes
from quire.files.gguf import GGML_TYPES, INTEGER_TYPES, read_gguf_shards
from quire.files.resolve import resolve_model
from quire.layers.embedding import PlainHead
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.quant.gguf import BlocksExperts, BlocksHead, BlocksLinear
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.ops.blocks import QuantizedMatrix, dequantize, has_layout, to_layout
from quire.ops.packed import pack
from quire.prepare.quantize import count_copied
from quire.types.errors import ModelError

NUMBER = {name: number for number, (name, _, _) in GGML_TYPES.items()}
SHORT = 1e-3  # products of factors are held in half precision
HALVES = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}  # where a block has its factors
FIRST, SECOND = ([int(id_) for id_ in torch.randint(2, 48, (40,), generator=torch.Generator().manual_seed(s))] for s in (1, 2))


def blocks_of(kind, rows, columns, seed=0, factors=(0.001, 0.0005)):
    """[rows, bytes] uint8. The package cannot make K blocks: any bytes are one, but factors must be sane."""
    random = np.random.default_rng(seed)
    if kind not in HALVES:
        values = random.normal(0.01, 0.05, (rows, columns)).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(rows, -1)
    _, elements, nbytes = GGML_TYPES[NUMBER[kind]]
    blocks = random.integers(0, 256, (rows * columns // elements, nbytes), np.uint8)
    start, stop = HALVES[kind]
    blocks[:, start:stop] = np.array(factors, np.float16).view(np.uint8)[: stop - start]
    return blocks.reshape(rows, -1)


def stored(kind, rows=24, columns=512, **options):
    return QuantizedMatrix(NUMBER[kind], columns, torch.from_numpy(blocks_of(kind, rows, columns, **options)))


def values_of(matrix):
    return dequantize(matrix.rows.flatten(), matrix.type, (len(matrix), matrix.columns))


def largest(values):
    """Of each 32."""
    return values.abs().view(len(values), -1, 32).amax(-1).repeat_interleave(32, 1)


@pytest.mark.parametrize("kind", INTEGER_TYPES)
def test_forms_have_the_values_of_the_file(kind, monkeypatch):
    monkeypatch.setattr("quire.ops.blocks.VALUES_AT_ONCE", 4096)  # several runs
    matrix = stored(kind)
    form, expected = to_layout(matrix, torch.device("cpu")), values_of(matrix)
    bits, group, offset = INTEGER_TYPES[kind]
    assert (form.bits, form.group, form.zeros is not None, form.inputs, form.outputs) == (bits, group, offset, 512, 24)
    near = (
        0 if kind in ("Q4_0", "Q5_0", "Q8_0") else 2.0**-10 * expected.abs().view(24, -1, 32).amax(-1).repeat_interleave(32, 1)
    )
    assert ((form.dequantize() - expected).abs() <= near).all()


def test_others_have_none():
    assert not any(has_layout(NUMBER[kind]) for kind in ("F16", "IQ4_NL", "Q2_K", "TQ1_0"))


def test_floats_of_4_bits():
    matrix = stored("MXFP4")
    form = to_layout(matrix, torch.device("cpu"))
    assert (form.kind, form.group, form.inputs, form.outputs) == ("fp4", 32, 512, 24)
    assert torch.equal(form.dequantize(), values_of(matrix))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
@pytest.mark.parametrize("factors", [(0.0, 0.01), (6e-8, 0.5), (6e-8, 6e-8), (0.0, 0.0), (-0.001, 0.0005)])
def test_factors_that_are_nothing_or_far_apart(kind, factors):
    matrix = stored(kind, factors=factors)
    expected, found = values_of(matrix), to_layout(matrix, torch.device("cpu")).dequantize()
    assert found.isfinite().all()
    assert ((found - expected).abs() <= 2.0**-9 * largest(expected)).all()


FIELDS = {
    "embedding_length": 256, "feed_forward_length": 512, "attention.head_count": 4, "attention.head_count_kv": 2,
    "rope.dimension_count": 64,
}  # fmt: skip
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q5_K", "ffn_gate": "Q5_1", "ffn_up": "Q8_0", "output.": "Q6_K"}


def in_blocks(tensors):
    for name, values in tensors.items():
        if values.ndim < 2:
            yield name, values / 4
            continue
        kind = next((kind for part, kind in MIXED.items() if part in name), "Q4_K")
        blocks = blocks_of(kind, int(np.prod(values.shape[:-1])), values.shape[-1], seed=len(name))
        yield name, (blocks.reshape(*values.shape[:-1], -1), gguf.GGMLQuantizationType[kind])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    tensors = llama_tensors({"block_count": 2, **FIELDS})
    tensors["output.weight"] = tensors["token_embd.weight"]
    path = tmp_path_factory.mktemp("mixed") / "tiny.gguf"
    return read_facts(resolve_model(str(tiny_llama(path, fields=FIELDS, tensors=dict(in_blocks(tensors))))))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    fields = {**FIELDS, "expert_count": 4, "expert_used_count": 2}
    tensors = llama_tensors({"block_count": 2, **fields})
    for layer in range(2):
        for name in ("gate", "up", "down"):
            one = tensors.pop(f"blk.{layer}.ffn_{name}.weight")
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = np.stack([one] * 4)
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = np.random.default_rng(layer).normal(size=(4, 256)).astype(np.float32)
    routers = {name: tensors.pop(name) for name in list(tensors) if "gate_inp" in name}
    path = tmp_path_factory.mktemp("mixture") / "tiny.gguf"
    whole = {**dict(in_blocks(tensors)), **routers}
    metadata = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(48)], "tokenizer.ggml.eos_token_id": 2}
    write_gguf(path, fields={**LLAMA, **fields}, metadata=metadata, tensors=whole)
    return read_facts(resolve_model(str(path)))


def load(facts, keeps=frozenset()):
    model = build_model(facts)
    load_weights(model, facts, device="cpu", dtype="float32", keep_quantized=bool(keeps), keeps=keeps)
    return model


def test_a_model_of_mixed_types(mixed):
    """Keys and values of other types than queries: their matrix is one, of 8 bits."""
    model, floats = load(mixed, KEEPS["cuda"]), load(mixed)
    for got, wanted in zip(in_pieces(model, FIRST, SECOND), in_pieces(floats, FIRST, SECOND), strict=True):
        assert (got - wanted).norm() < SHORT * wanted.norm()
    assert all(isinstance(layer.method, BlocksLinear) for layer in model.modules() if isinstance(layer, Linear))
    assert isinstance(model.lm_head.method, BlocksHead) and isinstance(floats.lm_head.method, PlainHead)
    tensors = [tensor for header in read_gguf_shards(mixed.files.weights) for tensor in header.tensors.values()]
    assert packed_weight_bytes(tensors, 4, True) < sum(tensor.elements for tensor in tensors) * 1.6


def test_files_tell_what_copies_take(mixed, mixture):
    """Not of experts, nor of the embedding."""
    pytest.importorskip("triton")
    for facts in (mixed, mixture):
        model = load(facts, KEEPS["cuda"])
        for layer in model.modules():
            if isinstance(getattr(layer, "method", None), BlocksLinear | BlocksHead):
                layer.method.matrix = pack(layer.method.matrix)
        tensors = [tensor for header in read_gguf_shards(facts.files.weights) for tensor in header.tensors.values()]
        assert copied_gguf_values(tensors) == count_copied(model, torch.bfloat16) > 0


def test_a_factor_that_is_no_number(tmp_path):
    """One below 0 is: so Q4_0 has the largest number of a block, and Q6_K any."""
    tensors = dict(in_blocks(llama_tensors({"block_count": 2, **FIELDS})))
    blocks, kind = tensors["blk.1.ffn_down.weight"]
    start, blocks = HALVES[kind.name][0], blocks.copy()
    for value in (-0.001, float("nan")):
        blocks[3, start : start + 2] = np.array([value], np.float16).view(np.uint8)
        path = tmp_path / f"{value}.gguf"
        facts = read_facts(
            resolve_model(str(tiny_llama(path, fields=FIELDS, tensors={**tensors, "blk.1.ffn_down.weight": (blocks, kind)})))
        )
        if value < 0:
            load(facts, KEEPS["cuda"])
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight has a scale that is NaN or infinite"):
        load(facts, KEEPS["cuda"])


def test_experts(mixture):
    model, floats = load(mixture, KEEPS["cuda"]), load(mixture)
    got, wanted = (Sequences(each, 1, 40).step([(0, FIRST)])[0] for each in (model, floats))
    assert (got - wanted).norm() < SHORT * wanted.norm()
    experts = [layer.method for layer in model.modules() if isinstance(layer, Experts)]
    assert len(experts) == 2 and all(isinstance(method, BlocksExperts) for method in experts)
    model = load(mixture, KEEPS["cuda"] - {"experts"})
    assert not any(isinstance(layer.method, BlocksExperts) for layer in model.modules() if isinstance(layer, Experts))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40])
def test_on_a_gpu(mixed, mixture, rows):
    for facts in (mixed, mixture):
        found = []
        for keeps in (KEEPS["cuda"], frozenset()):
            model = build_model(facts)
            load_weights(model, facts, device="cuda", dtype="bfloat16", keep_quantized=bool(keeps), keeps=keeps)
            found.append(Sequences(model, 1, 40, device="cuda").step([(0, FIRST[:rows])])[0].float())
        assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()
