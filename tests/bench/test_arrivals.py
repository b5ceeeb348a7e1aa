import math

import numpy as np
import pytest

from quire.bench.arrivals import LoadShape, arrival_times, rates
from quire.types.errors import ConfigError


def gaps(shape: LoadShape, count: int = 20001, seed: int = 0) -> np.ndarray:
    return np.diff(arrival_times(shape, count, seed))


def test_without_a_rate_all_are_due_at_once() -> None:
    assert not arrival_times(LoadShape(), 5, 0).any()
    assert not arrival_times(LoadShape(max_concurrency=3), 5, 0).any()
    assert arrival_times(LoadShape(request_rate=5), 0, 0).size == 0
    assert arrival_times(LoadShape(request_rate=5), 1, 0).tolist() == [0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    between = gaps(LoadShape(request_rate=50, burstiness=burstiness))
    assert between.min() >= 0
    assert between.mean() == pytest.approx(1 / 50, rel=0.03)
    assert between.std() / between.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)


def test_poisson_gaps_are_exponential_and_counts_are_poisson() -> None:
    times = arrival_times(LoadShape(request_rate=50), 20001, 3)
    between = np.diff(times) * 50
    for quantile in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(between, quantile) == pytest.approx(-math.log(1 - quantile), rel=0.05)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.2)
    assert abs(np.corrcoef(between[:-1], between[1:])[0, 1]) < 0.03


def test_a_seed_gives_the_same_arrivals() -> None:
    shape = LoadShape(request_rate=9)
    assert arrival_times(shape, 50, 1).tolist() == arrival_times(shape, 50, 1).tolist()
    assert arrival_times(shape, 50, 1).tolist() != arrival_times(shape, 50, 2).tolist()
    assert arrival_times(shape, 50, 1)[:20].tolist() == arrival_times(shape, 20, 1).tolist()


def test_ramps() -> None:
    linear = LoadShape(ramp="linear", ramp_start=0, ramp_end=10)
    assert rates(linear, 5).tolist() == [0.0, 2.5, 5.0, 7.5, 10.0]
    exponential = LoadShape(ramp="exponential", ramp_start=1, ramp_end=16)
    assert rates(exponential, 5).tolist() == [1.0, 2.0, 4.0, 8.0, 16.0]
    times = arrival_times(linear, 10001, 0)
    assert np.isfinite(times).all()
    assert np.diff(times[:1000]).mean() > 5 * np.diff(times[-1000:]).mean()
    assert np.diff(times[-1000:]).mean() == pytest.approx(1 / 9.5, rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"request_rate": 0}, "request-rate"),
        ({"request_rate": math.nan}, "request-rate"),
        ({"burstiness": 0, "request_rate": 1}, "burstiness"),
        ({"burstiness": 2}, "needs --request-rate"),
        ({"max_concurrency": 0}, "max-concurrency"),
        ({"ramp_start": 1}, "need --ramp-up-strategy"),
        ({"ramp": "linear", "ramp_start": 1}, "needs --ramp-up-start-rps"),
        ({"ramp": "linear", "ramp_start": 2, "ramp_end": 1}, "start <= end"),
        ({"ramp": "linear", "ramp_start": 0, "ramp_end": 0}, "start <= end"),
        ({"ramp": "exponential", "ramp_start": 0, "ramp_end": 1}, "0 < start"),
        ({"ramp": "linear", "ramp_start": 1, "ramp_end": 2, "request_rate": 3}, "drop one"),
    ],
)
def test_impossible_shapes(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LoadShape(**wrong)


def test_shapes_in_words() -> None:
    assert str(LoadShape()) == "all at once"
    assert str(LoadShape(max_concurrency=8)) == "closed loop, at most 8 at once"
    assert str(LoadShape(request_rate=2.5)) == "2.5 requests/s, Poisson"
    assert "burstiness 0.5" in str(LoadShape(request_rate=2.5, burstiness=0.5))
    assert str(LoadShape(ramp="linear", ramp_start=1, ramp_end=4)) == "linear ramp from 1 to 4 requests/s, Poisson"
