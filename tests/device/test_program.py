"""Graphs by kernels of our own against the same arithmetic by torch."""

import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F

from quire.device.cpu import program, repack
from quire.device.cpu.graph import CONTRIB, Graph, Runtime
from quire.device.cpu.session import Session
from quire.ops import native
from quire.ops.native import multiplies_floats

pytestmark = pytest.mark.skipif(not multiplies_floats(), reason="there are no kernels of our own for this CPU")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 128, 300)


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 5])
def workers(request, monkeypatch):
    monkeypatch.setattr(program, "workers", lambda: request.param)


def session(emit, columns: list[int], outputs: list[int]) -> Session:
    """Of a graph that `emit` writes: names of inputs -> names of outputs."""
    graph = Graph(Runtime.OWN)
    names = [graph.name() for _ in columns]
    made = emit(graph, names)
    return Session(graph, list(zip(names, columns, strict=True)), list(zip(made, outputs, strict=True)))


@pytest.mark.parametrize("columns", [32, 50, 3])
@pytest.mark.parametrize(
    "operator, attributes, expected",
    [
        ("Add", {}, lambda a, b: a + b),
        ("Mul", {}, lambda a, b: a * b),
        ("QuickGelu", {"alpha": 1.0}, lambda a, b: F.silu(a)),
        ("Gelu", {"approximate": "none"}, lambda a, b: F.gelu(a)),
        ("Gelu", {"approximate": "tanh"}, lambda a, b: F.gelu(a, approximate="tanh")),
    ],
)
def test_operators(operator, attributes, expected, columns, workers):
    both = operator in ("Add", "Mul")
    domain = CONTRIB if operator == "QuickGelu" else ""
    run = session(
        lambda graph, names: graph.add(operator, names if both else names[:1], domain=domain, **attributes),
        [columns, columns], [columns],
    )  # fmt: skip
    for rows in (1, 4, 7, 200):
        a, b = torch.randn(rows, columns) * 3, torch.randn(rows, columns)
        a[0, 0] = -200.0
        torch.testing.assert_close(run.run(a, b)[0], expected(a, b), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("columns", [64, 37])
def test_layer_norms(columns, shifted, workers):
    weight, bias = torch.randn(columns), torch.randn(columns) if shifted else None
    constants = [each.numpy() for each in (weight, bias) if each is not None]
    run = session(
        lambda graph, names: graph.add("LayerNormalization", [*names, *map(graph.constant, constants)], epsilon=1e-5),
        [columns], [columns],
    )  # fmt: skip
    for rows in (1, 7, 200):
        x = torch.randn(rows, columns) * 3 + 1
        torch.testing.assert_close(run.run(x)[0], F.layer_norm(x, (columns,), weight, bias, 1e-5), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("columns", [64, 37])
def test_norms(columns, workers):
    weight = torch.randn(columns)

    def emit(graph, names):
        [normed] = graph.add("SimplifiedLayerNormalization", [names[0], graph.constant(weight.numpy())], epsilon=1e-5)
        after, total = graph.name(), graph.name()
        inputs = [*names, graph.constant(weight.numpy())]
        graph.place("SkipSimplifiedLayerNormalization", inputs, [after, "", "", total], CONTRIB, epsilon=1e-5)
        return normed, after, total

    run = session(emit, [columns, columns], [columns] * 3)
    for rows in (1, 6, 150):
        a, b = torch.randn(rows, columns), torch.randn(rows, columns)
        expected = F.rms_norm(a, (columns,), weight, 1e-5), F.rms_norm(a + b, (columns,), weight, 1e-5), a + b
        for ours, theirs in zip(run.run(a, b), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def gated(weights: list[torch.Tensor]):
    """A feed-forward layer, which also gives away its gate."""

    def emit(graph, names):
        both = repack.emit_tiles(graph, names[0], repack.lay_out_floats(weights[0], None))
        gate, up = graph.add("Split", [both], outputs=2, axis=1, num_outputs=2)
        [opened] = graph.add("QuickGelu", [gate], domain=CONTRIB, alpha=1.0)
        [passed] = graph.add("Mul", [opened, up])
        down = repack.emit_tiles(graph, passed, repack.lay_out_floats(weights[1], None))
        return *graph.add("Add", [down, names[0]]), gate

    return emit


def test_a_whole_piece(workers):
    weights = [torch.randn(120, 40) / 6, torch.randn(40, 60) / 8]
    run = session(gated(weights), [40], [40, 60])
    for rows in ROWS:
        x = torch.randn(rows, 40)
        gate, up = F.linear(x, weights[0]).chunk(2, dim=-1)
        out, given = run.run(x)
        torch.testing.assert_close(out, x + F.linear(F.silu(gate) * up, weights[1]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(given, gate, atol=1e-5, rtol=1e-5)


def test_a_row_gets_the_same_bits_in_any_company(workers):
    run, x = session(gated([torch.randn(120, 40), torch.randn(40, 60)]), [40], [40, 60]), torch.randn(130, 40)
    together = run.run(x)[0].clone()
    for rows in ROWS[:-1]:
        assert torch.equal(run.run(x[:rows])[0], together[:rows])
    assert torch.equal(run.run(x[77:78])[0], together[77:78])


def test_what_is_not_a_number_stays_with_its_row():
    run, x = session(gated([torch.randn(120, 40), torch.randn(40, 60)]), [40], [40, 60]), torch.randn(9, 40)
    healthy = run.run(x)[0].clone()
    x[4] = float("nan")
    found = run.run(x)[0]
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert found[4].isnan().all() and torch.equal(found[others], healthy[others])


def test_programs_of_two_threads_at_the_same_time():
    """Whoever finds the other workers busy works alone."""
    weights = [torch.randn(240, 80), torch.randn(80, 120)]
    x = torch.randn(64, 80)
    expected = session(gated(weights), [80], [80, 120]).run(x)[0].clone()
    wrong = []

    def work():
        run = session(gated(weights), [80], [80, 120])
        wrong.extend(number for number in range(200) if not torch.equal(run.run(x)[0], expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_has_workers_of_its_own():
    run, x = session(gated([torch.randn(120, 40), torch.randn(40, 60)]), [40], [40, 60]), torch.randn(40, 40)
    expected = run.run(x)[0].clone()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # it would wait for threads that are not there
        os._exit(0 if torch.equal(run.run(x)[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_more_threads_than_kernels_take(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 100)
    assert native.workers() == native.MAX_WORKERS


def test_workers_without_cores_change_nothing_but_the_time(monkeypatch):
    """They wait for each other, until the caller works alone, and are asked again from time to time."""
    run, x = session(gated([torch.randn(120, 40), torch.randn(40, 60)]), [40], [40, 60]), torch.randn(64, 40)
    monkeypatch.setattr(program, "workers", lambda: 1)
    alone = run.run(x)[0].clone()
    monkeypatch.setattr(program, "workers", lambda: min(2 * (os.cpu_count() or 1) + 1, native.MAX_WORKERS))
    assert all(torch.equal(run.run(x)[0], alone) for _ in range(200))
