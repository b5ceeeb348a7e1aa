"""A quantized decoder as one network of OpenVINO against the same decoder layer by layer."""

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quantized_models import layered, loaded, skip_if_wrong

from gguf_files import LLAMA, llama_tensors, tiny_llama
from oracle import Sequences
from patience import PATIENCE
from quire import LLM, SamplingParams
from quire.config.facts import read_facts
from quire.device.cpu.device import has_openvino
from quire.files.resolve import resolve_model

if not has_openvino():
    pytest.skip("OpenVINO is for x86 CPUs, and is not installed here", allow_module_level=True)

from quire.device.cpu import network, openvino, prepare
from quire.device.cpu.autotune import Choice
from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.network import AttentionShape, DecoderNetwork, find_attention_shapes
from quire.device.cpu.prepare import CompiledBody, compile_body
from quire.device.cpu.segments import Segments
from quire.device.cpu.session import Session
from quire.device.cpu.trace import trace_body
from quire.ops.linear import linear
from quire.ops.norm import add_rms_norm, rms_norm

IDS = [3, 17, 42, 8, 30, 11, 25]
STEPS = [
    [(0, IDS), (1, IDS[:3]), (2, IDS * 5)],
    [(0, [5]), (1, [6]), (2, [7])],
    [(2, [9]), (0, [8])],
    [(1, [4])],
    [(1, [3]), (0, [2, 11])],
    [(2, IDS)],
    [(1, [1]), (2, [12]), (0, [13])],
]


@pytest.fixture(scope="module", autouse=True)
def openvino_can():
    if not network.agrees(AttentionShape(4, 2, 16, 0.25, 16, None)):
        pytest.skip("OpenVINO cannot attend over pages here")
    skip_if_wrong(Runtime.OPENVINO)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A tiny llama whose matrices are Q4_1, Q8_0 and, in one merged matrix, both."""
    fields = {**LLAMA, "embedding_length": 64, "rope.dimension_count": 16}
    tensors = {}
    for name, values in llama_tensors(fields).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if "attn_v" in name or "embd" in name else gguf.GGMLQuantizationType.Q4_1
        tensors[name] = (gguf.quants.quantize(values.astype(np.float32), kind), kind) if values.ndim == 2 else values
    path = tiny_llama(tmp_path_factory.mktemp("network") / "tiny.gguf", fields=fields, tensors=tensors)
    return read_facts(resolve_model(str(path)), {})


def networked(facts):
    model = loaded(facts)
    trace = trace_body(model.run_blocks, facts.hidden_size)
    blocks = lambda x, batch: pytest.fail("the network was not asked")  # noqa: E731
    model.body = CompiledBody(blocks, DecoderNetwork(trace, find_attention_shapes(trace)))
    return model


class Apart(Sequences):
    """Sequences in pages of 32 tokens, with keys apart from values. What nobody has written is NaN."""

    def __init__(self, model, count, length):
        super().__init__(model, count, length, page_size=32)
        for attention in model.attentions:
            attention.bind(attention.kv.transpose(0, 1).contiguous().transpose(0, 1), 0)


@pytest.fixture
def by_openvino(monkeypatch):
    """Single products, too: our own kernels round rows otherwise."""
    monkeypatch.setattr("quire.device.cpu.autotune.choose", choice(openvino=True))


def test_the_same_numbers_as_layer_by_layer(facts, by_openvino):
    """Of rows of any lengths, alone and together, and with another cache the second time."""
    by_layer, model = layered(facts), networked(facts)
    for _ in range(2):
        expected, found = Sequences(by_layer, 3, 60), Apart(model, 3, 60)
        for rows in STEPS:
            for theirs, ours in zip(expected.step(rows), found.step(rows), strict=True):
                assert (ours - theirs).norm() < 0.02 * theirs.norm()  # rounding to 8 bits is not the same everywhere


def test_near_the_dequantized_model(facts):
    expected = Sequences(loaded(facts, keep_quantized=False), 1, len(IDS)).step([(0, IDS)])[0]
    found = Apart(networked(facts), 1, len(IDS)).step([(0, IDS)])[0]
    assert (found - expected).norm() < 0.05 * expected.norm()  # each product is off by about 0.6 %


def test_tokens_are_left_out_in_the_end(facts):
    model = networked(facts)
    [whole] = Apart(model, 1, len(IDS)).step([(0, IDS)])
    [few] = Apart(model, 1, len(IDS)).step([(0, IDS)], kept=[2])
    torch.testing.assert_close(few, whole[-2:], atol=1e-5, rtol=1e-5)


def test_a_row_does_not_see_the_others(facts):
    """To the last bit: alone, in company, in other places of the step and of the cache."""
    model = networked(facts)
    together = Apart(model, 3, 60)
    together.step([(0, IDS * 6), (1, IDS), (2, IDS * 5)])
    expected = [together.step([(0, [token]), (1, [4]), (2, [7])])[0] for token in IDS]
    alone = Apart(model, 1, 60)
    alone.step([(0, IDS * 6)])
    found = [alone.step([(0, [token])])[0] for token in IDS]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_long_row_alone_is_divided(facts, by_openvino, monkeypatch):
    monkeypatch.setattr(network, "SPLIT_FROM", 40)
    model, by_layer = networked(facts), layered(facts)
    found, expected = Apart(model, 1, 60), Sequences(by_layer, 1, 60)
    for tokens in (IDS * 6, [3], [17]):
        [theirs], [ours] = expected.step([(0, tokens)]), found.step([(0, tokens)])
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(
    "form",
    [AttentionShape(4, 2, 16, 0.25, 8, None), AttentionShape(4, 4, 32, 0.3, 32, 1e-5), AttentionShape(6, 1, 80, 0.1, 0, None)],
)
def test_forms_of_attention(form):
    """Heads of which a part turns, heads that are normed, no rotation, and sizes that are no power of two."""
    assert network.agrees(form)


def test_rows_of_one_token_are_run_apart_from_prompts(facts):
    """Their numbers are those of a step of their own; what the decoder runs are the prompts alone, in their places."""
    model, asked = loaded(facts), []
    blocks = model.run_blocks
    trace = trace_body(blocks, facts.hidden_size)
    model.body = CompiledBody(
        lambda x, batch: asked.append(len(x)) or blocks(x, batch), DecoderNetwork(trace, find_attention_shapes(trace))
    )

    def stepped(rows, kept=None):
        model.body.compiled.too_many = 64
        sequences = Apart(model, 4, 60)
        sequences.step([(0, IDS), (2, IDS[:3])])
        model.body.compiled.too_many = 8
        return sequences.step(rows, kept)

    [first], [third] = stepped([(0, [5])]), stepped([(2, [6])])
    [second, fourth] = stepped([(1, IDS * 2), (3, IDS[::-1] * 2)])
    assert asked == [4 * len(IDS)]
    rows = [(0, [5]), (1, IDS * 2), (2, [6]), (3, IDS[::-1] * 2)]
    found = stepped(rows)
    assert asked == [4 * len(IDS)] * 2
    assert torch.equal(found[0], first) and torch.equal(found[2], third)
    torch.testing.assert_close(found[1], second, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[3], fourth, atol=1e-4, rtol=1e-4)
    none = stepped(rows, kept=[1, 0, 1, 0])  # chunks of prompts that go on
    assert [len(logits) for logits in none] == [1, 0, 1, 0] and torch.equal(none[0], first) and torch.equal(none[2], third)
    few = stepped(rows, kept=[1, 0, 1, 2])
    assert [len(logits) for logits in few] == [1, 0, 1, 2] and torch.equal(few[0], first) and torch.equal(few[2], third)
    torch.testing.assert_close(few[3], fourth[-2:], atol=1e-4, rtol=1e-4)


def test_the_runtime_tells_its_makers_nothing(tmp_path):
    """The package would report every import: no connection may be tried, and nothing be left in the user's home."""
    code = """
import socket, sys, torch
def refuse(*given): raise SystemExit("somebody is called")
socket.socket.connect = socket.create_connection = refuse
from quire.device.cpu.graph import Graph, Runtime, Value
from quire.device.cpu.openvino import Network
graph = Graph(Runtime.OPENVINO)
graph.place("Add", ["x", "x"], ["y"])
network, out = Network(graph, [Value("x", ("rows", 4))], [Value("y", ("rows", 4))]), torch.zeros(2, 4)
network.bind("x", torch.ones(2, 4))
network.bind("y", out)
network.run()
assert (out == 2).all()
"""
    unset = ("CI", "XDG_CACHE_HOME", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(tmp_path)}, check=True, timeout=PATIENCE)
    assert list(tmp_path.rglob("*")) == []


def choice(openvino):
    rows = [64] * 2
    return lambda: Choice(False, openvino, *rows, own_floats=False)


@pytest.mark.parametrize(
    "paged_cache, faster, kind", [(True, True, DecoderNetwork), (False, True, Segments), (True, False, Segments)]
)
def test_a_network_only_where_it_is_faster_and_can_be(facts, monkeypatch, paged_cache, faster, kind):
    monkeypatch.setattr(prepare, "choose", choice(faster))
    model = loaded(facts)
    assert type(compile_body(model.run_blocks, facts.hidden_size, whole=False, paged=paged_cache)) is kind


@pytest.mark.parametrize(
    "most, block_size, kind",
    [(4, None, DecoderNetwork), (4, 16, Segments), (1, None, DecoderNetwork)],
    ids=["many", "other pages", "one"],
)
def test_which_engines_get_a_network(facts, monkeypatch, most, block_size, kind):
    monkeypatch.setattr(prepare, "choose", choice(True))
    llm = LLM(
        str(facts.files.path), device="cpu", max_num_seqs=most, block_size=block_size, kv_cache_memory_bytes=1 << 20,
        skip_tokenizer_init=True,
    )  # fmt: skip
    runner = llm.llm_engine.core.executor._runner
    assert type(runner._model.body.compiled) is kind
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": IDS}, {"prompt_token_ids": IDS[::-1]}], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]


def test_a_network_that_cannot_be_made_is_pieces_instead(facts, monkeypatch, caplog):
    def refuse(*given):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(prepare, "choose", choice(True))
    monkeypatch.setattr(prepare, "DecoderNetwork", refuse)
    model = loaded(facts)
    model.body = CompiledBody(model.run_blocks, compile_body(model.run_blocks, facts.hidden_size, whole=False, paged=True))
    assert type(model.body.compiled) is Segments and "no such operator" in caplog.text
    expected = Sequences(layered(facts), 1, len(IDS)).step([(0, IDS)])[0]
    assert (Sequences(model, 1, len(IDS)).step([(0, IDS)])[0] - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    "body",
    [
        lambda x, weight: F.gelu(x),
        lambda x, weight: F.gelu(x, approximate="tanh"),
        lambda x, weight: F.silu(x).mul_(x) + x,
        lambda x, weight: rms_norm(x, weight, 1e-5, 1.0),
        lambda x, weight: sum(add_rms_norm(x, F.silu(x), weight, 1e-5)[1:], start=x),
        lambda x, weight: linear(x, weight.repeat(32, 1), weight),
        lambda x, weight: linear(x, weight.repeat(64, 1)).chunk(2, dim=-1)[1],
    ],
    ids=["gelu", "gelu by tanh", "silu", "norm with an offset", "norm of a sum", "float product", "halves"],
)
def test_operators_of_decoders(body):
    weight, x = torch.linspace(-1, 1, 32), torch.randn(5, 32)
    trace, graph = trace_body(lambda symbol, batch: body(symbol, weight), 32), Graph(Runtime.OPENVINO)
    names = {trace.first: "x"}
    for step in trace.segments[0].steps:
        names.update(zip(step.outputs, step.emit(graph, [names[symbol] for symbol in step.inputs]), strict=True))
    session = Session(graph, [("x", 32)], [(names[trace.last], trace.last.columns)])
    torch.testing.assert_close(session.run(x)[0], body(x.clone(), weight), atol=1e-4, rtol=1e-4)


def test_a_plugin_that_cannot_attend_is_not_used(facts, monkeypatch):
    monkeypatch.setattr(prepare, "choose", choice(True))
    monkeypatch.setattr(network, "agrees", lambda form: False)
    model = loaded(facts)
    assert type(compile_body(model.run_blocks, facts.hidden_size, whole=False, paged=True)) is Segments


def test_another_arity_of_the_operator_is_no_error(monkeypatch):
    """It is experimental: the next release may want other inputs."""
    monkeypatch.setattr("quire.device.cpu.openvino._convert_paged", lambda node: 1 / 0)
    openvino._core.cache_clear()
    try:
        assert not network.agrees.__wrapped__(AttentionShape(4, 2, 16, 0.25, 16, None))
    finally:
        openvino._core.cache_clear()
