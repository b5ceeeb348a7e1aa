"""Measure a model: all requests of a workload at once (throughput), one batch many times (latency), new processes (startup).

A model is any object that can generate; the caller makes it.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from quire.types.errors import EngineError
from quire.types.outputs import RequestOutput
from quire.types.prompts import PromptType
from quire.types.sampling import SamplingParams

Figures = dict[str, float]  # by name, flat: what two results are compared by


class Model(Protocol):
    def generate(
        self, prompts: Sequence[PromptType], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]: ...

    def reset_prefix_cache(self) -> bool: ...

    def start_profile(self) -> None: ...

    def stop_profile(self) -> list[str]: ...


@dataclass(frozen=True)
class OfflineWork:
    """Requests that all arrive at the start, each with its number of output tokens."""

    name: str
    prompts: Sequence[PromptType]
    params: Sequence[SamplingParams]


@dataclass(frozen=True)
class Run:
    """One pass over a workload. Times in seconds."""

    elapsed_time: float
    num_requests: int
    input_tokens: int
    output_tokens: int
    ttfts: Sequence[float]  # of each request
    tpots: Sequence[float]  # of each request with more than one token

    @property
    def ms_per_token(self) -> float | None:
        """Return milliseconds per token of a single request; None for several."""
        return 1000 * self.elapsed_time / self.output_tokens if self.num_requests == 1 else None

    @property
    def phases(self) -> tuple[float, float] | None:
        """Return input tokens per second until every request has its first token, and output tokens per second after that.

        None if no token comes after that.
        """
        first = max(self.ttfts, default=self.elapsed_time)
        if first >= self.elapsed_time or self.output_tokens == self.num_requests:
            return None
        return self.input_tokens / first, (self.output_tokens - self.num_requests) / (self.elapsed_time - first)

    def figures(self) -> Figures:
        """Return the figures, under the names of vLLM's result files where those have one."""
        found = {
            "elapsed_time": self.elapsed_time,
            "requests_per_second": self.num_requests / self.elapsed_time,
            "output_tokens_per_second": self.output_tokens / self.elapsed_time,
            "tokens_per_second": (self.input_tokens + self.output_tokens) / self.elapsed_time,
        }
        if self.phases is not None:
            found["prefill_tokens_per_second"], found["decode_tokens_per_second"] = self.phases
        return found if self.ms_per_token is None else {**found, "ms_per_token": self.ms_per_token}


def run_once(model: Model, work: OfflineWork, *, use_tqdm: bool = False) -> Run:
    """Run a workload with an empty prefix cache. A request that fails or ends early invalidates the figures and is an error."""
    if not model.reset_prefix_cache():
        raise EngineError("the prefix cache cannot be emptied: other requests run on this engine")
    began = time.perf_counter()
    outputs = model.generate(work.prompts, work.params, use_tqdm=use_tqdm)
    seconds = time.perf_counter() - began
    for output, params in zip(outputs, work.params, strict=True):
        (choice,) = output.outputs
        if choice.error is not None:
            raise EngineError(f"request {output.request_id} of {work.name} failed: {choice.error}")
        if params.ignore_eos and len(choice.token_ids) != params.max_tokens:
            raise EngineError(
                f"request {output.request_id} of {work.name} has {len(choice.token_ids)} of {params.max_tokens} tokens; "
                "a larger --max-model-len may be needed"
            )
    return Run(
        seconds,
        len(outputs),
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(output.outputs[0].token_ids) for output in outputs),
        [output.metrics.first_token_latency for output in outputs if output.metrics is not None],
        [tpot for output in outputs if (tpot := _tpot(output)) is not None],
    )


def measure(model: Model, work: OfflineWork, *, warmups: int, runs: int, use_tqdm: bool = False) -> list[Run]:
    for _ in range(warmups):
        run_once(model, work, use_tqdm=use_tqdm)
    return [run_once(model, work, use_tqdm=use_tqdm) for _ in range(runs)]


def profile(model: Model, work: OfflineWork) -> list[str]:
    """Run a workload once more with the profiler, whose cost the measured runs must not have; return the traces."""
    model.start_profile()
    try:
        run_once(model, work)
    finally:
        traces = model.stop_profile()
    return traces


def best(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: run.elapsed_time)


def throughput_of(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a workload's entry in the saved result: the best run, and all of them."""
    top = best(runs)
    return {
        "workload": name,
        "num_requests": top.num_requests,
        "total_input_tokens": top.input_tokens,
        "total_output_tokens": top.output_tokens,
        "total_num_tokens": top.input_tokens + top.output_tokens,
        **top.figures(),
        "runs": [run.figures() for run in runs],
    }


@dataclass(frozen=True)
class Latency:
    """Latency of one batch that ran many times: seconds for the batch, milliseconds for tokens."""

    avg_latency: float
    latencies: list[float]
    percentiles: dict[str, float]
    mean_ttft_ms: float
    mean_tpot_ms: float | None

    def figures(self) -> Figures:
        found = {"avg_latency": self.avg_latency, "mean_ttft_ms": self.mean_ttft_ms}
        found |= {f"p{cut}_latency": value for cut, value in self.percentiles.items()}
        return found if self.mean_tpot_ms is None else {**found, "mean_tpot_ms": self.mean_tpot_ms}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


CUTS = (10, 25, 50, 75, 90, 99)


def latency_of(runs: Sequence[Run]) -> Latency:
    latencies = [run.elapsed_time for run in runs]
    tpots = [tpot for run in runs for tpot in run.tpots]
    return Latency(
        float(np.mean(latencies)),
        latencies,
        {str(cut): float(np.percentile(latencies, cut)) for cut in CUTS},
        1000 * float(np.mean([ttft for run in runs for ttft in run.ttfts])),
        1000 * float(np.mean(tpots)) if tpots else None,
    )


def _tpot(output: RequestOutput) -> float | None:
    """Return seconds per token after the first."""
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    if metrics is None or count < 2:
        return None
    return (metrics.last_token_ts - metrics.first_token_ts) / (count - 1)


KERNEL_CACHE = "TRITON_CACHE_DIR"  # environment
OTHER, OTHER_SHARE = "other", 0.02  # time without a name is shown from this share of the whole on


@dataclass(frozen=True)
class StartupTimes:
    """Seconds since the process was started. `parts` follow each other and add up to `first_token`."""

    cold: bool
    ready: float
    first_token: float
    parts: list[tuple[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def start_once(command: Sequence[str], question: Mapping[str, Any], *, cold: bool) -> StartupTimes:
    """Start a process, send it the question as JSON, and read its last line of output:
    `ready` and `first_token` as times of the machine's clock, and the `parts` of the time until ready.

    A cold start has a new, empty Triton cache; a warm one finds the kernels that earlier starts compiled.
    """
    with tempfile.TemporaryDirectory(prefix="quire-cold-") as empty:
        environment = {**os.environ, KERNEL_CACHE: empty} if cold else dict(os.environ)
        began = time.monotonic()
        done = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise EngineError(f"the measured process ended with {done.returncode}; its messages are above")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    ready, first_token = answer["ready"] - began, answer["first_token"] - began
    parts = [(str(name), float(seconds)) for name, seconds in answer["parts"]] or [("start to ready", ready)]
    parts.append(("first token", first_token - ready))
    rest = first_token - sum(seconds for _, seconds in parts)
    if rest > OTHER_SHARE * first_token:
        parts.append((OTHER, rest))
    return StartupTimes(cold, ready, first_token, parts)


def startup_figures(starts: Sequence[StartupTimes]) -> dict[str, float]:
    """Return the first time and the means, of cold and of warm starts."""
    found: dict[str, float] = {}
    for name, some in (("cold", [s for s in starts if s.cold]), ("warm", [s for s in starts if not s.cold])):
        if some:
            found[f"first_{name}_first_token"] = some[0].first_token
            found[f"mean_{name}_first_token"] = _mean([start.first_token for start in some])
            found[f"mean_{name}_ready"] = _mean([start.ready for start in some])
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
