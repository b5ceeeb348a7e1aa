"""What the engine process and the grammar process say to each other: msgpack frames with their length in front."""

from collections.abc import Callable

import msgspec

from quire.types.structured import StructuredOutputsParams

AHEAD = "ahead"  # the argument of a process that nobody waits for yet
GIVES_WAY = "gives-way"  # the argument of a process that gets a core after others


class _GrammarFrame(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- to the grammar process


class StartWorker(_GrammarFrame):
    """Where the tokenizer comes from, and the numbers of the model."""

    path: str
    tokenizer: str | None
    revision: str | None
    vocab_size: int
    eos_ids: list[int]
    rows: int  # requests that have masks in the shared memory
    drafts: int = 0  # draft tokens per request: each has a mask of its own
    backend: str = "guidance"  # or "xgrammar"


class Rules(msgspec.Struct, array_like=True, frozen=True):
    """What one request asks of its grammar."""

    params: StructuredOutputsParams
    ignore_eos: bool = False  # the text ends only when nothing else may follow
    min_tokens: int = 0  # and no earlier than this, unless nothing else may follow


class Open(_GrammarFrame):
    """A request's matcher. Its mask goes to `row`, and those behind drafts to the rows after it; `tokens` were sampled by an
    engine before."""

    id: int
    row: int
    rules: Rules
    tokens: list[int]


class Check(_GrammarFrame):
    """Can this be compiled? The answer is an Opened without tokens."""

    id: int
    params: StructuredOutputsParams


class Accept(_GrammarFrame):
    """Sampled tokens, by matcher, and drafts of what may come behind them. The answer is Accepted, and Masked when the masks
    after the tokens, and after each draft, are written."""

    number: int
    tokens: list[tuple[int, list[int]]]
    drafts: list[tuple[int, list[int]]] = []


class Close(_GrammarFrame):
    ids: list[int]


# ---- from it


class WorkerStarted(_GrammarFrame):
    """The first thing it says, unless it could not even read the tokenizer."""

    error: str | None  # why this model cannot have structured outputs at all


class GrammarOpened(_GrammarFrame):
    id: int
    error: str | None  # why there is no matcher
    forced: list[int]  # the tokens that must come next


class Accepted(_GrammarFrame):
    number: int
    forced: list[tuple[int, list[int]]]  # by matcher, where there is no choice
    failed: list[tuple[int, str]]


class Masked(_GrammarFrame):
    number: int
    failed: list[tuple[int, str]]
    deferred: list[int] = []  # matchers of this message that were slow before: CaughtUp follows for each of them


class CaughtUp(_GrammarFrame):
    """A deferred matcher has taken all tokens up to message `number`, and its masks are written."""

    id: int
    number: int
    forced: list[int]
    error: str | None


class Slow(_GrammarFrame):
    """One matcher's work took so many seconds of processor time. Told as soon as it is done."""

    id: int
    seconds: float


Command = StartWorker | Open | Check | Accept | Close
Answer = WorkerStarted | GrammarOpened | Accepted | Masked | CaughtUp | Slow

encode = msgspec.msgpack.Encoder().encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode


def key_of(params: StructuredOutputsParams) -> bytes:
    """Equal for requests that can share a compiled grammar: when it starts is each one's own matter."""
    starts, params.starts_after = params.starts_after, None
    key = encode(params)
    params.starts_after = starts
    return key
