"""When a request is finished. Stop strings are text and are looked for by the text half."""

from array import array

from quire.types.request import FinishReason, Request
from quire.types.sampling import RepetitionDetectionParams


def finish(request: Request, token: int) -> tuple[FinishReason, int | None] | None:
    """(reason, stop token to report) if `token`, the newest, was the last one; None if the request goes on."""
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
    """No sooner than with this many tokens can `finish` say anything, unless a stop id comes."""
    return 0 if request.spec.params.repetition_detection is not None else request.limit


def repeats(tokens: "array[int]", prompt_length: int, pattern: RepetitionDetectionParams) -> bool:
    """Are the last sampled tokens one pattern, `min_count` times in a row? A tail with period p equals itself shifted by p."""
    for size in range(max(1, pattern.min_pattern_size), pattern.max_pattern_size + 1):
        length = size * pattern.min_count
        if len(tokens) - prompt_length < length:
            return False
        tail = tokens[-length:]
        if tail[size:] == tail[:-size]:
            return True
    return False
