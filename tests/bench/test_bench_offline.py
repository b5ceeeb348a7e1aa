import time
from collections.abc import Sequence
from typing import Any

import pytest

from quire.bench.machine import machine, read_gpu
from quire.bench.offline import OfflineWork, Run, latency_of, measure, run_once, throughput_of
from quire.types.errors import EngineError
from quire.types.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.types.sampling import SamplingParams


class Pretender:
    """Answers after some time; remembers when its cache was emptied."""

    def __init__(self, seconds: Sequence[float] = (0.0,), short: int = 0, error: str | None = None) -> None:
        self.seconds, self.short, self.error = list(seconds), short, error
        self.calls: list[str] = []
        self.idle = True

    def generate(
        self, prompts: Sequence[Any], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        assert use_tqdm is False
        self.calls.append("generate")
        time.sleep(self.seconds[(self.calls.count("generate") - 1) % len(self.seconds)])
        metrics = RequestMetrics(0.0, first_token_latency=0.25, first_token_ts=10.0, last_token_ts=11.0)
        return [
            RequestOutput(
                str(i), None, list(prompt), None,
                [CompletionOutput(0, "", [7] * ((params.max_tokens or 0) - self.short), error=self.error)], True, metrics,
            )
            for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]  # fmt: skip

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.idle


def work(count: int, tokens: int = 5) -> OfflineWork:
    return OfflineWork("w", [[1, 2, 3]] * count, [SamplingParams(max_tokens=tokens, ignore_eos=True)] * count)


def test_every_run_begins_with_an_empty_cache_and_the_best_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [64.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))
    model = Pretender(seconds=(0.0, 0.5, 0.25))
    runs = measure(model, work(4), warmups=1, runs=2)
    assert model.calls == ["reset", "generate"] * 3
    entry = throughput_of("w", runs)
    assert (entry["elapsed_time"], entry["runs"][0]["elapsed_time"]) == (0.25, 0.5)
    assert (entry["num_requests"], entry["total_input_tokens"], entry["total_output_tokens"]) == (4, 12, 20)
    assert entry["output_tokens_per_second"] == pytest.approx(20 / entry["elapsed_time"])
    assert entry["tokens_per_second"] == pytest.approx(32 / entry["elapsed_time"])
    assert "ms_per_token" not in entry


def test_one_request_has_milliseconds_per_token() -> None:
    run = run_once(Pretender(seconds=(0.02,)), work(1))
    assert run.ms_per_token == pytest.approx(1000 * run.elapsed_time / 5)


@pytest.mark.parametrize(
    ("model", "told"),
    [(Pretender(short=1), "4 of 5 tokens"), (Pretender(error="lost"), "failed: lost")],
)
def test_a_run_that_did_less_is_no_result(model: Pretender, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        run_once(model, work(2))


def test_a_busy_engine_is_not_measured() -> None:
    model = Pretender()
    model.idle = False
    with pytest.raises(EngineError, match="cannot be emptied"):
        run_once(model, work(2))


def test_first_tokens_and_the_rest() -> None:
    run = Run(3.0, 2, 600, 10, [0.5, 1.0], [0.01, 0.03])
    assert run.phases == (600.0, 4.0)  # 8 tokens came after the first ones, in 2 seconds
    assert run.figures()["decode_tokens_per_second"] == 4.0
    assert Run(1.0, 2, 600, 2, [0.5, 1.0], []).phases is None


def test_latency() -> None:
    runs = [Run(seconds, 2, 6, 10, [0.1, 0.3], [0.01, 0.03]) for seconds in (1.0, 2.0, 3.0)]
    latency = latency_of(runs)
    assert latency.avg_latency == 2.0
    assert latency.percentiles["50"] == 2.0
    assert latency.percentiles["90"] == pytest.approx(2.8)
    assert latency.mean_ttft_ms == pytest.approx(200)
    assert latency.mean_tpot_ms == pytest.approx(20)
    assert latency_of([run_once(Pretender(), work(2, tokens=1))]).mean_tpot_ms is None
    assert latency_of([run_once(Pretender(), work(2, tokens=5))]).mean_tpot_ms == pytest.approx(250)


def test_the_machine() -> None:
    facts = machine("cpu")
    assert facts["cpu"]
    assert facts["cpu_count"]
    assert facts["torch_version"]
    assert facts["resident_mb"] > 10
    assert "gpu" not in facts


def test_what_nvidia_smi_says() -> None:
    said = "NVIDIA H200, 580.95, 1980, 1980, 3201, 512.33, [N/A]\n"
    assert read_gpu(said) == {
        "gpu": "NVIDIA H200",
        "driver": "580.95",
        "sm_clock_mhz": 1980.0,
        "max_sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "power_watts": 512.33,
        "power_limit_watts": None,
    }
