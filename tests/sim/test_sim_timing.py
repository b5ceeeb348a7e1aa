"""Step times: from a card's numbers, and from measured steps."""

import json

import numpy as np
import pytest

from quire.bench.steps import StepPoint, TimedTurn, admission_times, host_times, summarize
from quire.config.memory import estimate_parameters, parameter_parts
from quire.sim import analytic
from quire.sim.analytic import CARDS, AnalyticTiming, GPUModel, HostTime, StepShape, find_card, read_rate, shape_of, windows_of
from quire.sim.fleet import FrontTime
from quire.sim.measured import MeasuredTiming, read_measured
from quire.types.cache import LayerCache
from quire.types.errors import ConfigError
from quire.types.plan import Ints, Outputs, RowShapes, StepPlan, recorded_width

LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128,
}  # fmt: skip


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def plan(count: tuple[int, ...], end: tuple[int, ...]) -> StepPlan:
    each, ones = ints(*count), ints(*[1] * len(count))
    return StepPlan(ints(*range(len(count))), ints(*end), RowShapes(each, 0 * each, Outputs.last(each, ones)), 0)


def test_shapes() -> None:
    every = ((None, 1.0),)
    assert shape_of(plan((1, 1), (10, 20)), every, 100) == StepShape(2, 2, 2, 2, 30, 30, 0, 0)
    assert shape_of(plan((1, 1), (10, 20)), every, 25).own_keys == 25  # some are shared
    assert shape_of(plan((4, 1), (6, 20)), every, 100) == StepShape(2, 1, 5, 2, 20, 20, 6, 3 + 4 + 5 + 6)
    half = windows_of([LayerCache(1, 8, None), LayerCache(1, 8, 8)])
    assert half == ((None, 0.5), (8, 0.5))
    assert shape_of(plan((1,), (20,)), half, 100).single_keys == (20 + 8) / 2
    assert shape_of(plan((4,), (40,)), half, 100).pairs == (37 + 38 + 39 + 40) / 2 + 4 * 8 / 2


def test_a_step_of_a_card() -> None:
    """Read once, multiplied once, and the layers' own time: one token has the bandwidth's time, thousands the processor's."""
    card, parts = GPUModel("a card", 2**30, 1e9, 1e12), parameter_parts(LLAMA)
    assert parts.total == estimate_parameters(LLAMA)
    timing = AnalyticTiming(card, parts, layers=3, weight_bytes=2, kv_bytes=100)
    one = timing.seconds(StepShape(1, 1, 1, 1, 0, 0, 0, 0))
    read = 2 * (parts.dense + parts.head) / (1e9 * analytic.WEIGHT_BANDWIDTH)
    assert one == pytest.approx(3 * analytic.LAYER_S + read, rel=1e-3)
    with_keys = timing.seconds(StepShape(1, 1, 1, 1, 5000, 5000, 0, 0))
    assert with_keys - one == pytest.approx(5000 * 100 / (1e9 * analytic.KV_BANDWIDTH))
    many = timing.seconds(StepShape(1, 0, 10**6, 1, 0, 0, 0, 0))
    assert many == pytest.approx(2 * parts.dense * 1e6 / (1e12 * analytic.GEMM_RATE), rel=1e-2)


def test_experts_are_read_as_far_as_they_are_asked() -> None:
    moe = LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    parts = parameter_parts(moe)
    assert parts.total == estimate_parameters(moe) and parts.expert == 3 * 3 * 64 * 32
    timing = AnalyticTiming(GPUModel("a card", 1, 1e9, 1e15), parts, layers=3, weight_bytes=2, kv_bytes=0)
    times = [timing.seconds(StepShape(n, n, n, n, 0, 0, 0, 0)) for n in (1, 2, 64)]
    expert = 2 * parts.expert / (1e9 * analytic.WEIGHT_BANDWIDTH)
    assert times[1] - times[0] == pytest.approx(8 * expert * 0.25 * 0.75, rel=1e-2)  # of the second token's, a quarter is read
    assert times[2] - times[0] == pytest.approx(6 * expert, rel=1e-2)


def test_cards_and_rates() -> None:
    assert find_card("H200") is CARDS["h200"]
    assert read_rate("bandwidth", "4.8TB/s") == pytest.approx(4.8e12) == read_rate("flops", "4.8T")
    assert read_rate("flops", "989TFLOPS") == pytest.approx(9.89e14) and read_rate("flops", "1e12") == 1e12
    with pytest.raises(ConfigError, match="--card 'h9' is unknown; there are a10, "):
        find_card("h9")
    with pytest.raises(ConfigError, match=r"--bandwidth '4\.8 parsecs' is not a rate such as 4\.8TB/s"):
        read_rate("bandwidth", "4.8 parsecs")
    with pytest.raises(ConfigError, match="--flops must be above 0"):
        GPUModel("a card", 1, 1, 0)


POINTS = [
    *(StepPoint(n, n, float(n * c), 0.0, 0.01 + 0.001 * n + 1e-6 * n * c) for n in (1, 4, 16) for c in (10, 100)),
    *(StepPoint(1, t, 0.0, float(t * c), 0.01 + 0.0005 * t + 1e-7 * t * c) for t in (8, 64) for c in (5, 200)),
]


def test_measured_steps_come_out_as_measured() -> None:
    timing = MeasuredTiming(POINTS, HostTime())
    for point in POINTS:
        shape = StepShape(
            point.rows, point.rows if point.tokens == point.rows else 0, point.tokens, 1, point.keys, 0, 0, point.pairs
        )
        assert timing.seconds(shape) == pytest.approx(point.seconds)
    between = timing.seconds(StepShape(8, 8, 8, 8, 0, 0, 0, 0))
    beyond = timing.seconds(StepShape(64, 64, 64, 64, 0, 0, 0, 0))
    assert (between, beyond) == pytest.approx((0.018, 0.074))
    mixed = timing.seconds(StepShape(5, 4, 36, 5, 0, 0, 0, 0))  # 32 prompt tokens beside four rows
    assert mixed == pytest.approx((0.01 + 0.0005 * 36) + (0.014 - 0.014), rel=1e-2)


def test_steps_with_prompts_are_run_as_large_as_they_are_recorded() -> None:
    """And the rows beside a prompt take what they were measured to take there."""
    alone = [StepPoint(1, n, 0.0, 0.0, 0.001 * n) for n in (16, 64, 128)]
    beside = [StepPoint(2, 96, 40.0, 0.0, 0.128), StepPoint(9, 128, 0.0, 0.0, 0.136), StepPoint(17, 128, 0.0, 0.0, 0.144)]
    singles = [StepPoint(n, n, 0.0, 0.0, 1.0) for n in (1, 2)]
    timing = MeasuredTiming([*singles, *alone, *beside], HostTime(), recorded_width)
    for rows, tokens, seconds in ((1, 60, 0.064), (1, 65, 0.128), (9, 65, 0.136), (13, 128, 0.140), (2, 90, 0.128)):
        assert timing.seconds(StepShape(rows, rows - 1, tokens, 1, 0, 0, 0, 0)) == pytest.approx(seconds)


def test_what_a_long_context_costs_in_any_case_is_not_counted_to_each_key() -> None:
    prompts = [StepPoint(1, n, 0.0, 0.0, 0.02) for n in (8, 64)]
    singles = [
        StepPoint(n, n, float(n * context), 0.0, 0.01 + 0.002 * (context > 64) + 1e-6 * n * context)
        for n in (1, 8, 32)
        for context in (64, 512)
    ]
    timing = MeasuredTiming([*singles, *prompts], HostTime())
    few, many = (timing.seconds(StepShape(32, 32, 32, 32, keys, 0, 0, 0)) for keys in (0, 10**5))
    assert many - few == pytest.approx(0.1)
    falling = [StepPoint(p.rows, p.tokens, p.keys, 0.0, 0.02 - p.seconds) for p in singles]
    timing = MeasuredTiming([*falling, *prompts], HostTime())
    few, many = (timing.seconds(StepShape(32, 32, 32, 32, keys, 0, 0, 0)) for keys in (0, 10**5))
    assert many == few


def test_medians_and_the_processors_part() -> None:
    turns = [TimedTurn(StepPoint(n, n, 10.0, 0.0, seconds), 0.001 + 0.0001 * n) for n in (1, 11) for seconds in (1.0, 9.0, 2.0)]
    points = summarize((turn.point.rows, turn) for turn in turns)
    assert [(point.rows, point.seconds) for point in points] == [(1, 2.0), (11, 2.0)]
    assert host_times(turns) == pytest.approx((0.001, 0.0001))
    assert host_times([]) == (0.0, 0.0)
    assert admission_times([(1, 0.0031), (1, 0.0041), (1, 0.0031), (5, 0.0045)], (0.001, 0.0001)) == pytest.approx(
        (0.00175, 0.00025)
    )


GOOD = {
    "kind": "steps", "model_id": "m", "host": {"step": 0.0, "row": 0.0}, "machine": {"cpu": "c"},
    "engine": {"device": "cpu", "block_size": 16, "num_pages": 10, "device_memory": 0},
    "points": [vars(point) for point in POINTS],
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("nothing", "kind is None, not 'steps'"),
        ({"kind": "latency"}, "kind is 'latency', not 'steps'; `quire bench steps` writes such a file"),
        ({"points": 3}, "points must be a list, got 3"),
        ({"points": [{"rows": 1}]}, "point 1: tokens must be a number from 0 to 1e+15, got None"),
        ({"points": [vars(POINTS[0]) | {"seconds": -1}]}, "point 1: seconds must be a number from 0 to 1e+15, got -1"),
        ({"points": [vars(POINTS[0]) | {"rows": 9}]}, "point 1: rows must be 1 or more and tokens no fewer, got 9 and 1"),
        ({"points": GOOD["points"][:6]}, "it has steps with one row of several tokens in fewer than 2 sizes"),
        ({"host": {"step": "fast", "row": 0}}, "host: step must be a number from 0 to 1e+15, got 'fast'"),
        ({"host": {"step": 10**400, "row": 0}}, "host: step must be a number from 0 to 1e+15, got 1000"),
        ({"points": [vars(point) | {"seconds": 1e308} for point in POINTS]}, "point 1: seconds must be a number from 0 to"),
        ({"engine": {}}, "engine: block_size must be a number from 0 to 1e+15, got None"),
        ({"machine": None}, "machine must be an object, got None"),
    ],
)
def test_bad_files_are_told(wrong, told: str, tmp_path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(wrong if isinstance(wrong, str) else GOOD | wrong))
    with pytest.raises(ConfigError) as raised:
        read_measured(path)
    assert told in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e15])
def test_steps_as_short_or_long_as_nobody_measures(seconds: float) -> None:
    points = [StepPoint(p.rows, p.tokens, p.keys, p.pairs, seconds) for p in POINTS]
    assert MeasuredTiming(points, HostTime()).seconds(StepShape(4, 4, 4, 4, 9, 9, 0, 0)) == pytest.approx(seconds)


def test_a_good_file(tmp_path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(GOOD))
    found = read_measured(path)
    assert (found.device, found.machine, found.pages, found.page_size) == ("cpu", "c", 10, 16)
    assert found.front is None and found.timing.host.newcomer == 0
    more = {"host": {"step": 0.001, "row": 0.0, "admission": 0.002, "newcomer": 0.003}}
    path.write_text(json.dumps(GOOD | more | {"front": {"alone": 0.009, "request": 0.001, "token": 0.0005}}))
    measured = read_measured(path)
    assert measured.front == FrontTime(pytest.approx(0.0025), 0.001, 0.0005)  # what the engine does is left to it
    assert found.timing.seconds(StepShape(4, 4, 4, 4, 0, 0, 0, 0)) == pytest.approx(0.014)
    path.write_text(json.dumps(GOOD | {"front": {"alone": 0.009, "request": 0.001, "token": 0.0005, "finish": 0.002}}))
    assert read_measured(path).front == FrontTime(pytest.approx(0.0085), 0.001, 0.0005, 0.002)
    on_gpu = {"engine": GOOD["engine"] | {"device": "cuda", "enforce_eager": False}}
    times = []
    for changed in (on_gpu, {"engine": on_gpu["engine"] | {"enforce_eager": True}}):
        path.write_text(json.dumps(GOOD | changed))
        times.append([read_measured(path).timing.seconds(StepShape(1, 0, n, 1, 0, 0, 0, 0)) for n in (33, 64)])
    assert times[0][0] == times[0][1] and times[1][1] > times[1][0]  # of 33 tokens as 64, where steps are recorded
    with pytest.raises(ConfigError, match="cannot read --timing"):
        read_measured(tmp_path / "nothing.json")
