"""Messages between the engine process and the grammar process."""

from collections.abc import Callable

import msgspec

from quire.proc.messages import WireMessage, decoder
from quire.proc.messages import encode as encode
from quire.types.structured import StructuredOutputsParams

AHEAD = "ahead"  # option of a process that no request waits for yet
GIVES_WAY = "gives-way"  # option of a process that runs at low priority


# ---- to the grammar process


class StartWorker(WireMessage):
    """The first message: where the tokenizer is, and sizes of the model."""

    path: str
    tokenizer: str | None
    revision: str | None
    vocab_size: int
    eos_ids: list[int]
    rows: int  # maximum requests with masks in the shared memory
    drafts: int = 0  # draft tokens per request: each has a mask of its own
    backend: str = "guidance"  # or "xgrammar"


class Rules(msgspec.Struct, array_like=True, frozen=True):
    """The constraint of one request, and when its text may end."""

    params: StructuredOutputsParams
    ignore_eos: bool = False  # the text may end only when nothing else may follow
    min_tokens: int = 0  # it may not end earlier, unless nothing else may follow


class Open(WireMessage):
    """Make a request's matcher; the answer is GrammarOpened.

    row: of its mask in the shared memory; the masks after draft tokens follow it
    tokens: the text so far
    """

    id: int
    row: int
    rules: Rules
    tokens: list[int]


class Check(WireMessage):
    """Ask whether a constraint can be compiled; the answer is GrammarOpened."""

    id: int
    params: StructuredOutputsParams


class Accept(WireMessage):
    """Sampled tokens by matcher, and draft tokens after them.

    The answers are Accepted, and Masked when the masks after the tokens and after each draft token are written.
    """

    number: int
    tokens: list[tuple[int, list[int]]]
    drafts: list[tuple[int, list[int]]] = msgspec.field(default_factory=list)


class Close(WireMessage):
    ids: list[int]


# ---- from the grammar process


class WorkerStarted(WireMessage):
    """The first answer, unless the tokenizer cannot be read."""

    error: str | None  # why structured outputs are not supported with this model


class GrammarOpened(WireMessage):
    id: int
    error: str | None  # why the constraint cannot be compiled
    forced: list[int]  # the tokens that must come next


class Accepted(WireMessage):
    number: int
    forced: list[tuple[int, list[int]]]  # the only tokens that may come next, by matcher
    failed: list[tuple[int, str]]


class Masked(WireMessage):
    number: int
    failed: list[tuple[int, str]]
    # matchers that were slow before: CaughtUp follows for each of them
    deferred: list[int] = msgspec.field(default_factory=list)


class CaughtUp(WireMessage):
    """A deferred matcher has taken all tokens up to message `number`, and its masks are written."""

    id: int
    number: int
    forced: list[int]
    error: str | None


class Slow(WireMessage):
    """One turn of a matcher took this many seconds of processor time."""

    id: int
    seconds: float


Command = StartWorker | Open | Check | Accept | Close
Answer = WorkerStarted | GrammarOpened | Accepted | Masked | CaughtUp | Slow

decode_command: Callable[[bytes], Command] = decoder(Command)
decode_answer: Callable[[bytes], Answer] = decoder(Answer)


def key_of(params: StructuredOutputsParams) -> bytes:
    """Return a key that is equal for requests that can share a compiled grammar; `starts_after` is not part of it."""
    starts, params.starts_after = params.starts_after, None
    key = encode(params)
    params.starts_after = starts
    return key
