"""Token usage, timings and the fingerprint: of a whole answer, and of the chunks of a stream as stream_options ask."""

from typing import Any

from quire.serve.generation import GenerationJob
from quire.serve.protocol import StreamOptions, Timing, Usage
from quire.serve.server import Server
from quire.types.outputs import RequestMetrics, RequestOutput


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, reasoning_tokens: int | None = None
) -> Usage:
    """None: left out."""
    usage: Usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": min(reasoning_tokens, completion_tokens)}
    return usage


def timing_of(metrics: RequestMetrics | None, speculates: bool = False) -> Timing | None:
    """`speculates`: it might have had drafts."""
    if metrics is None:
        return None
    queued, scheduled = metrics.queued_ts, metrics.scheduled_ts
    first, last, tokens = metrics.first_token_ts, metrics.last_token_ts, metrics.num_generation_tokens
    generation = _between(first, last)
    running = _between(scheduled, last)
    timing: Timing = {
        "time_to_first_token_ms": _between(queued, first),
        "generation_time_ms": generation,
        "queue_time_ms": _between(queued, scheduled),
        "prefill_time_ms": _between(scheduled, first),
        "mean_itl_ms": generation / (tokens - 1) if generation is not None and tokens > 1 else None,
        "tokens_per_second": tokens / running * 1000 if running else None,
        "preemptions": metrics.num_preemptions,
    }
    if speculates or metrics.num_spec_steps:
        steps, drafts, accepted = metrics.num_spec_steps, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
        timing["speculative_decoding"] = {
            "num_spec_steps": steps,
            "num_draft_tokens": drafts,
            "num_accepted_draft_tokens": accepted,
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafts if drafts else 0.0,
        }
    return timing


def _between(start: float, end: float) -> float | None:
    """Milliseconds; a time of 0 has not come."""
    return max(0.0, end - start) * 1000 if start and end else None


class StreamUsage:
    """A stream ends with a usage chunk if that is `wanted`; otherwise its last choice carries what concerns all of it."""

    def __init__(self, server: Server, job: GenerationJob, options: StreamOptions | None) -> None:
        forced = server.settings.enable_force_include_usage
        self.wanted = forced or (options is not None and bool(options.include_usage))
        self._in_every_chunk = forced or (self.wanted and options is not None and bool(options.continuous_usage_stats))
        self._server = server
        self._job = job
        self._cached = [0] * len(job.prompts)
        self._open = len(job.prompts) * job.n
        self._last: RequestOutput | None = None

    def note(self, prompt: int, output: RequestOutput) -> None:
        self._cached[prompt] = output.num_cached_tokens
        self._last = output

    def mark(self, chunk: dict[str, Any], prompt: int, tokens: int, finished: bool) -> dict[str, Any]:
        """A chunk of one choice, which has `tokens` so far, with usage and timings as asked for."""
        if self._in_every_chunk:
            chunk["usage"] = usage_of(len(self._job.prompts[prompt].ids), tokens, None)
        if finished and not self.wanted:
            self._open -= 1
            chunk["system_fingerprint"] = self._server.fingerprint
            if self._open == 0:
                chunk |= self._times()
        return chunk

    def final(self, tokens: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Return the content of the usage chunk."""
        cached = self._server.reported_cached(sum(self._cached))
        usage = usage_of(self._job.prompt_tokens, tokens, cached, reasoning_tokens)
        return {"usage": usage, "system_fingerprint": self._server.fingerprint, **self._times()}

    def _times(self) -> dict[str, Any]:
        """Times of several choices together would mean nothing."""
        if not self._job.timed or len(self._cached) * self._job.n > 1 or self._last is None:
            return {}
        return {"metrics": timing_of(self._last.metrics, self._server.speculates)}
