import math

import pytest

from quire.bench.metrics import (
    Record,
    Spread,
    peak_concurrency,
    peak_throughput,
    read_goodput,
    read_metrics,
    read_percentiles,
    summarize,
)
from quire.types.errors import ConfigError


def record(sent: float, arrivals: list[float], end: float, tokens: int | None = None, **more: object) -> Record:
    return Record(
        sent=sent, arrivals=arrivals, end=end, output_tokens=len(arrivals) if tokens is None else tokens, due=sent, **more
    )  # fmt: skip


def test_the_times_of_one_request() -> None:
    one = record(10.0, [10.5, 10.75, 11.5], 11.625)
    assert (one.ttft, one.latency, one.tpot, one.itls) == (0.5, 1.625, 0.5, [0.25, 0.75])


def test_tokens_of_one_chunk_are_seen_together() -> None:
    """Seven tokens in three chunks: six intervals, of which two took time; their mean is the time per token."""
    one = record(0.0, [1.0, 2.0, 4.0], 4.0, tokens=7)
    assert sorted(one.itls) == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]
    assert one.tpot == 0.5 == sum(one.itls) / len(one.itls)


def test_k_chunks_in_one_packet_measure_as_one_chunk_of_k_tokens() -> None:
    packet, chunk = record(0.0, [1.0, 1.0, 3.0, 3.0], 3.0), record(0.0, [1.0, 3.0], 3.0, tokens=4)
    assert sorted(packet.itls) == sorted(chunk.itls)
    assert packet.tpot == chunk.tpot


def test_one_token_has_no_time_per_token() -> None:
    one = record(0.0, [1.0], 1.0)
    assert one.tpot is None
    assert one.itls == []
    summary = summarize([one], 1.0, goodput={"tpot": 1.0})
    assert summary.spreads["tpot"] is None
    assert summary.spreads["itl"] is None
    assert summary.request_goodput == 1.0


def test_a_spread() -> None:
    spread = Spread.of([0.001, 0.002, 0.003, 0.010], [0, 25, 50, 100])
    assert spread is not None
    assert (spread.mean, spread.median) == (4.0, 2.5)
    assert spread.std == pytest.approx(math.sqrt((9 + 4 + 1 + 36) / 4))
    assert spread.percentiles == {0: 1.0, 25: 1.75, 50: 2.5, 100: 10.0}
    assert Spread.of([], [50]) is None


def test_a_summary() -> None:
    records = [
        record(0.0, [0.5, 1.0, 1.5], 1.5, prompt_tokens=10, cached_tokens=8, asked_tokens=3),
        record(0.0, [1.0, 3.0], 3.0, tokens=5, prompt_tokens=20, asked_tokens=6),
        record(1.0, [2.0], 2.0, prompt_tokens=30, asked_tokens=1, counted=False),
        record(0.0, [0.1], 9.0, prompt_tokens=1000, error="HTTP 500"),
    ]
    summary = summarize(records, 4.0, percentiles=[50, 99.9], goodput={"ttft": 999.0, "tpot": 600.0})
    assert (summary.completed, summary.failed) == (3, 1)
    assert (summary.total_input_tokens, summary.total_cached_tokens, summary.total_output_tokens) == (60, 8, 9)
    assert (summary.request_throughput, summary.output_throughput, summary.total_token_throughput) == (0.75, 2.25, 17.25)
    assert summary.request_goodput == 1 / 4  # the second and third took 1,000 ms to the first token
    assert summary.tokens_per_chunk == 9 / 6
    assert (summary.short, summary.uncounted, summary.max_concurrent_requests) == (1, 1, 4)
    flat = summary.as_dict()
    assert flat["mean_ttft_ms"] == pytest.approx((500 + 1000 + 1000) / 3)
    assert flat["median_tpot_ms"] == 500.0
    assert flat["mean_itl_ms"] == pytest.approx(3000 / 6)
    assert flat["p50_e2el_ms"] == 1500.0
    assert "p99.9_e2el_ms" in flat
    assert "spreads" not in flat


def test_goodput_counts_a_bound_as_kept() -> None:
    records = [record(0.0, [0.25, 0.5], 0.5)]
    for bounds, good in (
        ({"ttft": 250}, 1),
        ({"ttft": 249}, 0),
        ({"tpot": 250, "e2el": 500}, 1),
        ({"ttft": 250, "e2el": 499}, 0),
    ):
        assert summarize(records, 1.0, goodput=bounds).request_goodput == good
    assert summarize(records, 1.0).request_goodput is None


def test_nothing_succeeded() -> None:
    summary = summarize([record(0.0, [], 1.0, error="HTTP 500")], 1.0, goodput={"ttft": 1.0})
    assert (summary.completed, summary.failed, summary.output_throughput, summary.max_output_tokens_per_s) == (0, 1, 0.0, 0.0)
    assert set(summary.spreads.values()) == {None}
    assert summarize([], 0.0).request_throughput == 0.0


def test_waiting_in_the_client() -> None:
    late = Record(due=1.0, sent=1.5, arrivals=[2.0], end=3.0, output_tokens=1)
    spreads = summarize([late], 3.0, metrics=["client_queue_time", "e2el_including_client_queue", "e2el"]).spreads
    assert [spread.mean for spread in spreads.values() if spread] == [500.0, 2000.0, 1500.0]


def test_peaks() -> None:
    records = [record(5.0, [5.5, 6.125, 6.25, 6.875], 7.0), record(6.0, [6.5, 8.5], 8.5, tokens=4), record(7.0, [9.75], 10.0)]
    assert peak_throughput(records) == 3 + 2  # from 6.125 on; a chunk of the second request is two tokens
    assert peak_throughput(records, 0.125) == 2 / 0.125
    assert peak_throughput(records, 2.0) == (4 + 2) / 2
    assert peak_concurrency(records) == 2  # the first ends as the third begins
    assert (peak_concurrency([]), peak_throughput([])) == (0, 0.0)


def test_a_run_of_less_than_a_second_has_its_mean_as_peak() -> None:
    summary = summarize([record(0.0, [0.125, 0.25], 0.25)], 0.25)
    assert summary.max_output_tokens_per_s == summary.output_throughput == 8


def test_what_the_flags_say() -> None:
    assert read_goodput(["ttft:200", "e2el:3e3"]) == {"ttft": 200.0, "e2el": 3000.0}
    assert read_metrics("ttft, itl,ttft") == ("ttft", "itl")
    assert read_percentiles("50,99.9") == (50.0, 99.9)
    for pairs in (["itl:3"], ["ttft"], ["ttft:-1"], ["ttft:nan"], ["ttft:x"]):
        with pytest.raises(ConfigError, match="goodput"):
            read_goodput(pairs)
    with pytest.raises(ConfigError, match="not 'speed'"):
        read_metrics("ttft,speed")
    for text in ("101", "-1", "a", "nan"):
        with pytest.raises(ConfigError, match="metric-percentiles"):
            read_percentiles(text)
