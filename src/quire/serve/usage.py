"""What an answer cost, from what the engine tells."""

from quire.serve.protocol.usage import Timing, Usage
from quire.types.outputs import RequestMetrics


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, reasoning_tokens: int | None = None
) -> Usage:
    """None: not told."""
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
