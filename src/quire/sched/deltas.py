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


def unscored(request: Request, scores: TopLogprobs, start: int) -> tuple[TopLogprobs, ...]:
    """The prompt scores not handed out yet: a preempted request runs its prompt again.

    Score j of a row that began at `start` is of position start + 1 + j.
    """
    skip = max(0, request.scored - start)
    if skip >= len(scores.rank):
        return ()
    request.scored = start + len(scores.rank)
    return (TopLogprobs(scores.ids[skip:], scores.values[skip:], scores.rank[skip:]),)
