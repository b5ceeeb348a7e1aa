"""What the front half hears of a request after a step."""

from quire.types.outputs import TokenDelta
from quire.types.plan import TopLogprobs
from quire.types.request import Request


def delta(
    request: Request,
    tokens: list[int],
    *,
    stop: int | None = None,
    error: str | None = None,
    logprobs: tuple[TopLogprobs, ...] = (),
    prompt_logprobs: tuple[TopLogprobs, ...] = (),
) -> TokenDelta:
    return TokenDelta(
        request.spec.id, tokens, request.finished, stop, error, logprobs, prompt_logprobs,
        request.cached, request.scheduled_at, request.preemptions,
    )  # fmt: skip


def each_token(scores: TopLogprobs | None, count: int) -> tuple[TopLogprobs, ...]:
    """Those of the first `count` positions, one by one."""
    if scores is None:
        return ()
    ids, values, rank = scores.ids, scores.values, scores.rank
    return tuple(TopLogprobs(ids[i : i + 1], values[i : i + 1], rank[i : i + 1]) for i in range(count))
