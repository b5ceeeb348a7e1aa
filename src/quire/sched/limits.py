"""Limits of requests: admission by length, stop conditions, and the budget of reasoning tokens."""

import sys
from array import array

from quire.cache.layout import longest, pages_for
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError, PromptTooLong, RequestError
from quire.types.request import EngineRequest, FinishReason, Request
from quire.types.sampling import RepetitionDetectionParams


class RequestLimits:
    def __init__(
        self,
        layout: CacheLayout,
        pages: int,
        max_model_len: int,
        budget: int,
        chunk_cap: int | None,
        chunked: bool,
        undivided: bool = False,
    ) -> None:
        """undivided: some rows have more tokens than the chunk cap allows."""
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
        self.chunk = budget if chunk_cap is None else min(budget, chunk_cap)  # the longest row, unless it cannot be divided
        self.longest_row = budget if undivided else self.chunk

    def row_length(self, request: Request, left: int) -> int:
        """Return the tokens of the request's next row if the step has `left`; 0: no row."""
        known = request.known
        if known < 1 or request.computed + known >= request.limit:
            return 0
        if known == 1:  # decode, the usual case: neither budget nor cap can cut it
            return 1
        count = min(known, left, self.chunk)
        return count if self._chunked or count == known else 0

    def admissible_length(self, spec: EngineRequest) -> int:
        """Return the maximum length of a request, prompt included. Raise RequestError if it can never run."""
        length, max_tokens = len(spec.prompt), spec.params.max_tokens
        if not length:
            raise RequestError("the prompt is empty; it must have at least one token", "prompt")
        if (highest := spec.highest_position) >= max(length, self._max_model_len):
            raise PromptTooLong(
                f"the last frames of the prompt's videos have rotary positions up to {highest}; the longest context is "
                f"{self._max_model_len}. Send shorter videos or fewer frames per second, or raise max_model_len",
                "prompt",
            )
        longest = self._max_model_len + (not spec.samples)
        limit = longest if max_tokens is None else min(length + max_tokens, longest)
        begun = length + len(spec.resumed)
        if begun >= limit and not spec.samples:
            raise PromptTooLong(f"the prompt has {length} tokens; the longest context is {self._max_model_len}", "prompt")
        if begun >= limit:
            raise PromptTooLong(f"the request has {begun} tokens and may have {limit}: none is left to generate", "prompt")
        stored = limit - 1  # the last sampled token is never run
        if not self._chunked and stored > self.budget:
            raise self._too_long_a_step(stored)
        needed = pages_for(self._layout, stored, self.longest_row)
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
        possible = longest(self._layout, self._pages, stored, self.longest_row)
        return PromptTooLong(
            f"the request may grow to {stored} tokens and {needed} cache pages, but there are only {self._pages}, "
            f"{needed - self._pages} too few: shorten it or lower max_tokens by at least {stored - possible} tokens",
            "prompt",
        )


def finish(request: Request, token: int) -> tuple[FinishReason, int | None] | None:
    """Return (reason, stop token to report) if `token`, the newest, ends the request; None if it continues."""
    spec, tokens = request.spec, request.tokens
    # a grammar allows it before min_tokens when nothing else may follow
    grammar_ended = request.constrained and token in spec.eos_ids
    if token in spec.stop_ids and (grammar_ended or len(tokens) - len(spec.prompt) > spec.params.min_tokens):
        return "stop", None if token in spec.eos_ids else token
    if len(tokens) >= request.limit:
        return "length", None
    pattern = spec.params.repetition_detection
    if pattern is not None and repeats(tokens, len(spec.prompt), pattern):
        return "repetition", None
    return None


def next_check(request: Request) -> int:
    """Return the length from which on `finish` can end the request without a stop id."""
    return 0 if request.spec.params.repetition_detection is not None else request.limit


def repeats(tokens: "array[int]", prompt_length: int, pattern: RepetitionDetectionParams) -> bool:
    """Return whether the sampled tokens end in `min_count` equal patterns. A tail of period p equals itself shifted by p."""
    for size in range(max(1, pattern.min_pattern_size), pattern.max_pattern_size + 1):
        length = size * pattern.min_count
        if len(tokens) - prompt_length < length:
            return False
        tail = tokens[-length:]
        if tail[size:] == tail[:-size]:
            return True
    return False


def reasoning_budget_left(request: Request) -> int:
    """Return how many next tokens the reasoning budget cannot force. Pending tokens are counted."""
    budget = request.spec.params.thinking_token_budget
    if budget is None or request.reasoning_ended:
        return sys.maxsize
    return budget - (request.computed + request.known - len(request.spec.prompt))


def forced_end(request: Request) -> int | None:
    """Return the token that the reasoning budget forces next, when nothing is pending; None: it forces none."""
    params, start = request.spec.params, len(request.spec.prompt)
    budget, ends = params.thinking_token_budget, params.thinking_end_ids or []
    if budget is None or request.reasoning_ended or len(request.tokens) - start < budget:
        return None
    begun = len(request.tokens) - start - budget  # tokens of the end that have been forced
    forced = params.thinking_forced_ids or ends
    if begun == 0:
        reasoning = request.tokens[start:].tolist()
        request.reasoning_ended = any(reasoning[i : i + len(ends)] == ends for i in range(len(reasoning)))
    elif begun >= len(forced):
        request.reasoning_ended = True
    return None if request.reasoning_ended else forced[begun]
