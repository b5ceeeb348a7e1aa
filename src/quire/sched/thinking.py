"""thinking_token_budget: an answer that begins with reasoning may spend so many tokens on it; then its end is drawn.

    sampled   [ reasoning ........ | end ids | answer ... ]
    budget    [ at most so many    )

Whether the end came by itself is known only when all tokens before the draw are.
"""

import sys

from quire.types.request import Request


def left_to_think(request: Request) -> int:
    """Of the next tokens, so many are none that the budget may decide about. Pending tokens are counted, unseen."""
    budget = request.spec.params.thinking_token_budget
    if budget is None or request.thought:
        return sys.maxsize
    return budget - (request.computed + request.known - len(request.spec.prompt))


def forced_end(request: Request) -> int | None:
    """The token that must be drawn next, when nothing but that draw is pending."""
    params, start = request.spec.params, len(request.spec.prompt)
    budget, ends = params.thinking_token_budget, params.thinking_end_ids or []
    if budget is None or request.thought or len(request.tokens) - start < budget:
        return None
    begun = len(request.tokens) - start - budget  # how much of the end has been forced
    forced = params.thinking_forced_ids or ends
    if begun == 0:
        thinking = request.tokens[start:].tolist()
        request.thought = any(thinking[i : i + len(ends)] == ends for i in range(len(thinking)))
    elif begun >= len(forced):
        request.thought = True
    return None if request.thought else forced[begun]
