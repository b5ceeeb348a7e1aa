"""A quantized decoder compiled in pieces against the same decoder layer by layer."""

from contextlib import nullcontext

import gguf
import numpy as np
import pytest
import torch
from quantized_models import layered, loaded, skip_if_wrong

from gguf_files import LLAMA, llama_tensors, tiny_llama
from oracle import Sequences
from quire.attn.batch import PLAIN
from quire.config.facts import read_facts
from quire.device.cpu import prepare, segments
from quire.device.cpu.device import has_openvino
from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.prepare import CompiledBody, PackedFloats, compile_body, pack_blocks
from quire.device.cpu.segments import Segments
from quire.device.cpu.trace import trace_body
from quire.files.resolve import resolve_model
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.ops import paged_attention
from quire.ops.native import kernels, multiplies, multiplies_floats
from quire.ops.paged_attention import PagedAttention

IDS = [3, 17, 42, 8, 30, 11, 25]
RUNTIMES = [*([Runtime.OPENVINO] if has_openvino() else []), *([Runtime.OWN] if multiplies() and multiplies_floats() else [])]


@pytest.fixture(params=RUNTIMES)
def runtime(request, monkeypatch):
    """Who runs the pieces, and what they are compared with."""
    skip_if_wrong(request.param)
    monkeypatch.setattr("quire.device.cpu.prepare.runtime_for_blocks", lambda: request.param)
    return request.param


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A tiny llama whose matrices are Q4_1, Q8_0 and, in one merged matrix, both."""
    tensors = {}
    for name, values in llama_tensors(LLAMA).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if "attn_v" in name or "embd" in name else gguf.GGMLQuantizationType.Q4_1
        if values.ndim == 2:
            tensors[name] = (gguf.quants.quantize(values.astype(np.float32), kind), kind)
        else:
            tensors[name] = values
    path = tiny_llama(tmp_path_factory.mktemp("blocks") / "tiny.gguf", tensors=tensors)
    return read_facts(resolve_model(str(path)), {})


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """The same with heads of 16 components, which the kernel can attend with."""
    fields = {**LLAMA, "embedding_length": 64, "rope.dimension_count": 16}
    kind = gguf.GGMLQuantizationType.Q4_1
    tensors = {
        name: (gguf.quants.quantize(values.astype(np.float32), kind), kind) if values.ndim == 2 else values
        for name, values in llama_tensors(fields).items()
    }
    path = tiny_llama(tmp_path_factory.mktemp("wider") / "tiny.gguf", fields=fields, tensors=tensors)
    return read_facts(resolve_model(str(path)), {})


class Lined(Sequences):
    """Sequences whose cache lies line by line, and whose pages follow each other unless `scattered` names the sequence."""

    def __init__(self, model, count, length, scattered=()):
        super().__init__(model, count, length)
        per_row = self.tables[0].shape[1]
        self.tables = [1 + torch.arange(count * per_row, dtype=torch.int32).view(count, per_row)]
        for sequence in scattered:
            self.tables[0][sequence] = self.tables[0][sequence].flip(0)
        for attention in model.attentions:
            lines = attention.kv.permute(1, 2, 0, 3, 4).contiguous()
            attention.bind(lines.zero_().permute(2, 0, 1, 3, 4), 0)


def test_pieces_are_the_layers_in_fewer_calls(facts, runtime):
    by_layer, compiled = layered(facts), loaded(facts, True)
    compiled.body = CompiledBody(
        compiled.run_blocks, Segments(trace_body(compiled.run_blocks, facts.hidden_size), runtime, whole=False)
    )
    assert len(compiled.body.compiled._stages) == len(facts.layers) + 1
    expected = Sequences(by_layer, 1, len(IDS)).step([(0, IDS)])[0]
    found = Sequences(compiled, 1, len(IDS)).step([(0, IDS)])[0]
    near = torch.isclose(found, expected, atol=1e-4, rtol=1e-3).all(dim=1)
    assert near.sum() >= len(IDS) - 1  # an activation halfway between two of 8 bits may be rounded the other way
    assert (found - expected).norm() < 0.01 * expected.norm()
    few = Sequences(compiled, 1, len(IDS)).step([(0, IDS)], kept=[2])[0]
    torch.testing.assert_close(few, found[-2:], atol=1e-4, rtol=1e-3)


def test_near_the_dequantized_model(facts):
    expected = Sequences(loaded(facts, False), 1, len(IDS)).step([(0, IDS)])[0]
    found = Sequences(layered(facts), 1, len(IDS)).step([(0, IDS)])[0]
    assert (found - expected).norm() < 0.05 * expected.norm()  # each product is off by about 0.6 %


def test_floats_are_the_same_floats_in_pieces(facts, runtime, monkeypatch):
    expected = Sequences(loaded(facts, False), 1, len(IDS)).step([(0, IDS)])[0]
    compiled, operators, place = loaded(facts, False), [], Graph.place
    monkeypatch.setattr(
        Graph, "place", lambda self, operator, *args, **more: operators.append(operator) or place(self, operator, *args, **more)
    )
    compiled.body = CompiledBody(
        compiled.run_blocks, Segments(trace_body(compiled.run_blocks, facts.hidden_size), runtime, whole=True)
    )
    if runtime is Runtime.OPENVINO:
        assert operators.count("Gemm") == 5 * len(facts.layers) and "Split" not in operators  # gate and up are made apart
    else:
        assert operators.count("Tiles") == 4 * len(facts.layers) == 4 * operators.count("Split")  # which costs nothing
    matrices = [module.weight for module in compiled.layers.modules() if isinstance(module, Linear)]
    assert all(matrix.numel() == 0 for matrix in matrices)  # the runtime has its own copy
    found = Sequences(compiled, 1, len(IDS)).step([(0, IDS)])[0]
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_head_gives_the_same_logits(tied, bias, runtime):
    embedding = Embedding(96, 32)
    embedding.weight = torch.nn.Parameter(torch.randn(96, 32), requires_grad=False)
    head = Head(96, 32, tied=embedding if tied else None, bias=bias, scale=0.5)
    if not tied:
        head.weight = torch.nn.Parameter(torch.randn(96, 32), requires_grad=False)
    if bias:
        head.bias = torch.nn.Parameter(torch.randn(96), requires_grad=False)
    some = [torch.randn(rows, 32) for rows in (1, 5, 70)]
    expected = [head(hidden, PLAIN) for hidden in some]
    head.use(PackedFloats(head.matrix(), head.bias, runtime))
    for hidden, logits in zip(some, expected, strict=True):
        torch.testing.assert_close(head(hidden, PLAIN), logits, atol=1e-5, rtol=1e-5)
    assert embedding(torch.tensor([5]), PLAIN).shape == (1, 32)  # what is looked up stays
    assert tied or head.weight is None


def test_what_cannot_be_traced_is_left_alone(facts):
    assert compile_body(lambda x, batch: torch.cumsum(x, 0), facts.hidden_size, whole=True, paged=False) is None


@pytest.mark.parametrize("least", [1, 4])
def test_many_rows_go_layer_by_layer(facts, least, runtime, monkeypatch):
    """The same numbers, for every row of the step or for none: all that is lost is lost by rounding factors to bfloat16."""
    exact, model = loaded(facts, False), loaded(facts, True)
    expected = Sequences(exact, 1, len(IDS)).step([(0, IDS)])[0]
    model.body = CompiledBody(model.run_blocks, Segments(trace_body(model.run_blocks, facts.hidden_size), runtime, whole=False))
    model.body.compiled.too_many = least
    model.lm_head = exact.lm_head  # its own rounds inputs to 8 bits, however many rows there are
    found = Sequences(model, 1, len(IDS)).step([(0, IDS)])[0]
    assert (found - expected).norm() < 0.03 * expected.norm()
    monkeypatch.setattr("quire.ops.dequantized_linear._bfloat16_products", nullcontext)
    found = Sequences(model, 1, len(IDS)).step([(0, IDS)])[0]
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_single_tokens_go_by_pieces_however_many(facts, runtime):
    model = loaded(facts, True)
    asked, segments = [], Segments(trace_body(model.run_blocks, facts.hidden_size), runtime, whole=False)
    segments.too_many = 2
    model.body = CompiledBody(lambda x, batch: asked.append(len(x)) or model.run_blocks(x, batch), segments)
    sequences = Sequences(model, 3, 8)
    for rows in ([(0, [3]), (1, [4]), (2, [5])], [(0, [3, 4])], [(0, [3]), (1, [4, 5])], [(2, [6])]):
        sequences.step(rows)
    assert asked == [2, 3]


STEPS = [
    [(0, IDS), (1, IDS[:3]), (2, IDS[2:])],
    [(0, [5]), (1, [6]), (2, [7])],
    [(2, [9]), (0, [8])],
    [(1, [4])],
    [(1, [3]), (0, [2, 11])],
    [(1, [1]), (2, [12]), (0, [13])],
]


@pytest.mark.parametrize("scattered", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_few_tokens_on_a_track(wider, scattered, by_kernel, runtime, monkeypatch):
    """Four of the steps have rows of one token only, and in one of these some are in line and some scattered. Rows of several
    write their keys before they attend."""
    by_layer, compiled = layered(wider), loaded(wider, True)
    compiled.body = CompiledBody(
        compiled.run_blocks, Segments(trace_body(compiled.run_blocks, wider.hidden_size), runtime, whole=False)
    )
    calls, by_torch, attend_heads = [], [], segments.attend_heads
    monkeypatch.setattr(paged_attention, "suits", lambda kv, suits=paged_attention.suits: by_kernel and suits(kv))
    monkeypatch.setattr(PagedAttention, "run", lambda self, rows, run=PagedAttention.run: calls.append(self) or run(self, rows))
    monkeypatch.setattr(segments, "attend_heads", lambda *args: by_torch.append(args) or attend_heads(*args))
    for _ in range(2):  # with another cache the second time
        expected, found = Lined(by_layer, 3, 20), Lined(compiled, 3, 20, scattered)
        for rows in STEPS:
            there = len(calls), len(by_torch)
            ours = found.step(rows)
            several = any(len(ids) > 1 for _, ids in rows)
            by_ours = by_kernel and kernels() is not None
            assert len(by_torch) - there[1] == (0 if by_ours else len(wider.layers))
            assert len(calls) - there[0] == (len(wider.layers) * (1 + several) if by_ours else 0)
            for one, other in zip(ours, expected.step(rows), strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def grow(sequences):
    """Prompts of different lengths, then tokens for rows that come and go, over several pages."""
    found = sequences.step([(0, IDS), (1, IDS[:3]), (2, IDS[2:]), (3, [9])])
    for step in range(44):
        rows = [(row, [3 + (7 * step + row) % 38]) for row in (2, 0, 3, 1) if (step + row) % 5]
        found += sequences.step(rows)
    return found


@pytest.mark.parametrize("scattered", [(1,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("keep_quantized", [True, False])
def test_scattered_rows_get_the_same_bits(wider, keep_quantized, scattered, runtime, monkeypatch):
    if kernels() is None:
        pytest.skip("no C compiler was there when Quire was installed")
    monkeypatch.delattr("quire.device.cpu.segments.attend_heads")
    model = loaded(wider, keep_quantized)
    model.body = CompiledBody(
        model.run_blocks, Segments(trace_body(model.run_blocks, wider.hidden_size), runtime, whole=not keep_quantized)
    )
    expected, found = grow(Lined(model, 4, 48)), grow(Lined(model, 4, 48, scattered))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.skipif(Runtime.OWN not in RUNTIMES, reason="there are no kernels of our own for this CPU")
@pytest.mark.parametrize("keep_quantized", [True, False])
def test_by_kernels_of_our_own_a_row_gets_the_same_bits_in_any_company(wider, keep_quantized, monkeypatch):
    monkeypatch.setattr(prepare, "runtime_for_blocks", lambda: Runtime.OWN)
    model = loaded(wider, keep_quantized)
    model.body = CompiledBody(
        model.run_blocks, Segments(trace_body(model.run_blocks, wider.hidden_size), Runtime.OWN, whole=not keep_quantized)
    )
    head = model.lm_head
    pack_blocks(head) if keep_quantized else head.use(PackedFloats(head.matrix(), head.bias, Runtime.OWN))
    alone = [Lined(model, 4, 48) for _ in range(4)]
    together = Lined(model, 4, 48)
    for step in range(12):
        chosen = [row for row in range(4) if not step or (step + row) % 3]
        rows = [(row, [3 + (7 * step + row) % 38, 9][: 1 + (step + row) % 2]) for row in chosen]
        hidden = [found.clone() for found in together.step(rows)]
        for (row, ids), found in zip(rows, hidden, strict=True):
            each = [alone[row].step([(row, [token])])[0].clone() for token in ids]
            assert torch.equal(torch.cat(each), found)


@pytest.mark.parametrize(
    "blocks, floats, best, expected",
    [
        (True, False, (Runtime.OWN, Runtime.OPENVINO), Runtime.OWN),
        (True, False, (None, Runtime.OWN), None),
        (False, True, (Runtime.OPENVINO, Runtime.OWN), Runtime.OWN),
        (False, True, (Runtime.OWN, None), None),
        (True, True, (Runtime.OWN, Runtime.OWN), Runtime.OWN),
        (True, True, (Runtime.OPENVINO, Runtime.OWN), Runtime.OPENVINO),  # which knows both kinds
        (True, True, (Runtime.OPENVINO, None), Runtime.OPENVINO),
        (True, True, (Runtime.OWN, None), None),
    ],
)
def test_who_runs_the_pieces(blocks, floats, best, expected, monkeypatch):
    monkeypatch.setattr(prepare, "runtime_for_blocks", lambda: best[0])
    monkeypatch.setattr(prepare, "runtime_for_floats", lambda: best[1])
    assert prepare._runtime(blocks=blocks, floats=floats) == expected
