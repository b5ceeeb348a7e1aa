"""What one request may be: its length limit, the longest row, and the refusal of what could never run, even alone.

Clients hear of prompts beyond the context from `text/prompts.py`; here the engine does not rely on that.
"""

from quire.cache.capacity import longest, pages_for
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError, PromptTooLong, RequestError
from quire.types.request import EngineRequest, Request


class RequestLimits:
    def __init__(
        self, layout: CacheLayout, pages: int, max_model_len: int, budget: int, chunk_cap: int | None, chunked: bool
    ) -> None:
        if not chunked and chunk_cap is not None:
            raise ConfigError(
                f"a chunk cap of {chunk_cap} tokens needs chunked prefill, which is off; turn it on or drop the cap"
            )
        for name, value in (("pages", pages), ("max_model_len", max_model_len), ("max_batched_tokens", budget)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if chunk_cap is not None and chunk_cap < 1:
            raise ConfigError(f"the chunk cap must be at least 1 token, got {chunk_cap}; leave it out for no cap")
        self._layout, self._pages, self._max_model_len, self._chunked = layout, pages, max_model_len, chunked
        self.budget = budget
        self.chunk = budget if chunk_cap is None else min(budget, chunk_cap)  # the longest possible row

    def row_length(self, request: Request, left: int) -> int:
        """How many tokens its next row has when the step has room for `left`; 0 if it gets none."""
        known = request.known
        if known < 1 or request.computed + known >= request.limit:
            return 0
        if known == 1:  # by far the most frequent, and neither budget nor cap can cut it
            return 1
        count = min(known, left, self.chunk)
        return count if self._chunked or count == known else 0

    def admissible_length(self, spec: EngineRequest) -> int:
        """Never more tokens than this, prompt included. Raises RequestError if the request can never run."""
        length, most = len(spec.prompt), spec.params.max_tokens
        if not length:
            raise RequestError("the prompt is empty; it must have at least one token", "prompt")
        limit = self._max_model_len if most is None else min(length + most, self._max_model_len)
        begun = length + len(spec.resumed)
        if begun >= limit:
            raise PromptTooLong(f"the request has {begun} tokens and may have {limit}: none is left to be drawn", "prompt")
        stored = limit - 1  # the last sampled token is never run
        if not self._chunked and stored > self.budget:
            raise self._too_long_a_step(stored)
        needed = pages_for(self._layout, stored, self.chunk)
        if needed > self._pages:
            raise self._too_many_pages(stored, needed)
        return limit

    def _too_long_a_step(self, stored: int) -> PromptTooLong:
        return PromptTooLong(
            f"the request may grow to {stored} tokens, but without chunked prefill all must fit one step of {self.budget} "
            f"tokens: shorten it or lower max_tokens by at least {stored - self.budget}",
            "prompt",
        )

    def _too_many_pages(self, stored: int, needed: int) -> PromptTooLong:
        possible = longest(self._layout, self._pages, stored, self.chunk)
        return PromptTooLong(
            f"the request may grow to {stored} tokens and {needed} cache pages, but there are only {self._pages}, "
            f"{needed - self._pages} too few: shorten it or lower max_tokens by at least {stored - possible} tokens",
            "prompt",
        )
