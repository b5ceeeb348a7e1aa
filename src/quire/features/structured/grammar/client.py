"""The engine's side of a grammar process: requests with grammars, their forced tokens, and their token masks.

The grammar process runs concurrently. Tokens are sent when they are known, and masks are read when they are needed. No step
waits for a late mask: `News` reports when it is written. If the process is lost, its requests wait for another process, which
receives their tokens so far. A grammar that kills a second process is refused.

A process that another process killed (SIGKILL, SIGTERM) is no fault of the requests: it is replaced, with growing pauses
between starts, as long as requests wait. Starts that fail by themselves are given up after MAX_FAILED_STARTS.
"""

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

from quire.features.structured.grammar import wire
from quire.features.structured.grammar.wire import Process, Words
from quire.types.errors import EngineError, InvalidParameter
from quire.types.request import EngineRequest
from quire.types.structured import FIELD, StructuredOutputsParams

STEP_TIMEOUT_S = 5.0  # without a message while masks for sampled tokens are due
CHECK_TIMEOUT_S = 60.0  # for a grammar check: the process may have to start, and other grammars may come first
COMPILE_TIMEOUT_S = 20.0  # without a message of a process that compiles grammars; longer than a trial takes
MAX_OPEN_GRAMMARS = 4096  # requests with a mask row in the process; the others wait
MAX_FAILED_STARTS = 3  # in a row that end or hang by themselves
MAX_KILLED_STARTS_S = 300.0  # in which every start is killed from outside
RESTART_PAUSE_S, MAX_RESTART_PAUSE_S = 0.05, 2.0  # after the first killed start; doubled after each further one
MAX_DEATHS = 2  # of processes working on a grammar, without progress in between; the last one worked on no other grammar
MAX_LOSSES = 8  # of processes working on one request
MAX_MASK_CPU_S = 10.0  # processor time that the slow masks of a request's choices may take together
MAX_MASK_CPU_S_PER_TOKEN = 0.02  # added for every token of them
NO_START = "the grammar process does not start; the server's log has the reason"
LOST = f"the grammar process was lost {MAX_LOSSES} times while it followed this request"
DEADLY = "this grammar makes the library that follows it crash or hang, so it cannot be used; an equivalent grammar may work"
TOO_SLOW = "its masks take too long ({:.1f} s for {} tokens), so it was given up; a grammar with less ambiguity may work"
ALL_ALLOWED = 0xFFFFFFFF  # a mask word

logger = logging.getLogger(__name__)


@dataclass
class News:
    """Reports of the grammar process since the last call."""

    ready: list[str] = field(default_factory=list)  # requests whose masks are written
    lost: list[str] = field(default_factory=list)  # were ready; not ready until reported again
    refused: list[tuple[str, str]] = field(default_factory=list)  # request and the error of its grammar
    failed: list[tuple[str, str]] = field(default_factory=list)  # request and an error that its grammar did not cause

    def move(self, name: str) -> None:
        """Report a request as lost: another process must open it first."""
        self.lost.append(name)
        if name in self.ready:
            self.ready.remove(name)

    def add(self, other: "News") -> None:
        self.ready += other.ready
        self.lost += other.lost
        self.refused += other.refused
        self.failed += other.failed


@dataclass(eq=False)
class _OpenGrammar:
    """A request's grammar, with all that another process needs to continue it."""

    number: int
    name: str | None  # None: only a check whether the grammar can be compiled
    rules: wire.Rules
    tokens: list[int]  # of the answer so far
    request: str = ""  # id that all choices of a request share
    row: int = -1  # its mask row, while it is open in a process
    ready: bool = False
    awaited: bool = False  # its mask was late: `news` will report it
    sent_in: int = 0  # the number of the message with its latest tokens
    losses: int = 0  # of processes that worked on it
    suspected: int = 0  # of these losses, those since it was last ready: it may have caused them
    tokens_at_kill: int = -1  # len(tokens) when a process working on it was last killed from outside
    slow: float = 0.0  # seconds of processor time that its slow masks took
    verdict: Exception | None = None  # of a check

    @cached_property
    def grammar(self) -> bytes:
        return fingerprint(self.rules.params)


class Grammars:
    def __init__(self, start: wire.StartWorker, gives_way: bool = False) -> None:
        """gives_way: its process has lower CPU priority than the engine and the other processes"""
        self._gives_way = gives_way
        self.words = -(-start.vocab_size // 32)
        self.losses = 0  # of processes
        self._start = start
        self._process: Process | None = None
        self._failed_starts = 0
        self._killed_starts = 0  # starts in a row that ended because another process killed them
        self._killed_since = 0.0  # time of the first of these starts
        self._next_start = 0.0  # time.monotonic() of the earliest next start
        self._received_at = 0.0  # time.monotonic() of its latest message
        self._deadly: set[bytes] = set()  # fingerprints of grammars that kill processes
        each = 1 + start.drafts
        self._rows = list(range((start.rows - 1) * each, -1, -each))
        self._open: dict[str, _OpenGrammar] = {}
        self._by_number: dict[int, _OpenGrammar] = {}
        self._queue: list[_OpenGrammar] = []  # not sent to the process yet
        self._opening: dict[_OpenGrammar, float] = {}  # sent and not answered; time of sending
        self._lost: list[_OpenGrammar] = []  # were open in a process that is lost
        self._numbers = self._sent = self._accepted = self._masked = 0
        self._unanswered: deque[tuple[int, float]] = deque()  # number and time of messages whose masks are due
        self._deferred: dict[_OpenGrammar, float] = {}  # the process computes their masks last; time of the report
        self._late: list[_OpenGrammar] = []  # with `awaited`
        self._tokens: dict[int, list[int]] = {}  # to be sent
        self._drafts: dict[int, list[int]] = {}  # draft tokens after them
        self._news = News()
        self._forced: dict[int, list[int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __len__(self) -> int:
        return len(self._open)

    # ---- open and close

    def open(self, request: EngineRequest) -> None:
        """Open a request; `news` reports that it is ready or what is wrong."""
        params = request.params
        assert params.structured_outputs is not None
        rules = wire.Rules(params.structured_outputs, params.ignore_eos, params.min_tokens)
        entry = self._open[request.id] = self._enqueue(request.id, rules, list(request.resumed))
        entry.request = request.fork_of or request.id

    def adopt(self, other: _OpenGrammar) -> None:
        """Open a request that another process followed so far."""
        assert other.name is not None
        entry = self._open[other.name] = self._enqueue(other.name, other.rules, other.tokens)
        entry.request, entry.losses, entry.slow = other.request, other.losses, other.slow

    def take_slow(self, budget: float, known: Container[bytes]) -> list[_OpenGrammar]:
        """Close and return requests with slow grammars.

        budget: seconds of processor time for the slow masks of all open requests with one grammar
        known: grammars that exceeded the budget before
        """
        spent: dict[bytes, float] = {}
        for entry in self._open.values():
            if entry.slow:
                spent[entry.grammar] = spent.get(entry.grammar, 0.0) + entry.slow
        if not spent and not known:
            return []
        taken = [
            entry
            for entry in self._open.values()
            if entry.ready and (entry.grammar in known or spent.get(entry.grammar, 0.0) > budget)
        ]
        for entry in taken:
            del self._open[entry.name or ""]
            self._forget(entry)
        return taken

    def close(self, name: str) -> None:
        entry = self._open.pop(name, None)
        if entry is not None:
            self._forget(entry)

    def check(self, params: StructuredOutputsParams) -> None:
        """Wait for the result of a trial compilation. Raise InvalidParameter if the grammar cannot be compiled."""
        entry = self._enqueue(None, wire.Rules(params), [])
        deadline = time.monotonic() + CHECK_TIMEOUT_S
        while not entry.ready and entry.verdict is None and time.monotonic() < deadline:
            self._read(deadline - time.monotonic())
            self._reopen()
            self._send_queue()
        self._forget(entry)
        if not entry.ready:
            raise entry.verdict or EngineError(f"the grammar process has not answered for {CHECK_TIMEOUT_S:g} s")

    def prepare(self) -> None:
        """Start the process before a request needs it."""
        self._spawn(spare=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None
            self._accepted = self._masked = self._sent
            self._unanswered.clear()
            self._deferred.clear()

    # ---- the loop

    def accept(self, name: str, tokens: Sequence[int]) -> None:
        """Append tokens to a request's answer; `send` sends them."""
        entry = self._open.get(name)
        if entry is not None and tokens:
            entry.tokens += tokens
            if entry.ready:
                self._forced.pop(entry.number, None)
                entry.sent_in = self._sent + 1
                self._tokens.setdefault(entry.number, []).extend(tokens)

    def guess(self, name: str, drafts: Sequence[int]) -> None:
        """Note draft tokens after the latest tokens of a request: they require masks, too."""
        entry = self._open.get(name)
        if entry is not None and entry.number in self._tokens:
            self._drafts[entry.number] = list(drafts)[: self._start.drafts]

    def send(self) -> None:
        if self._tokens:
            tokens, self._tokens, drafts, self._drafts = self._tokens, {}, self._drafts, {}
            self._sent += 1
            self._unanswered.append((self._sent, time.monotonic()))
            self._send(wire.Accept(self._sent, list(tokens.items()), list(drafts.items())))

    def wait(self, seconds: float) -> None:
        """Wait for a message, at most `seconds`."""
        self._read(seconds)

    def news(self) -> News:
        """Return the reports since the last call. A lost request gets no more tokens until it is ready again."""
        self._read(0.0)
        self._check_silence()
        self._reopen()
        if self._process is None and self._queue:
            self._send_queue()
        news, self._news = self._news, News()
        if any(entry.suspected for entry in (*self._queue, *self._opening)):
            self._news.ready, news.ready = news.ready, []  # requests that continue now would be suspected, too
        return news

    def wait_forced(self, seconds: float) -> None:
        """Wait until `forced` is up to date, except for requests with late masks, at most `seconds`."""
        if self._accepted < self._sent:
            last = max((entry.sent_in for entry in self._open.values() if entry.ready and not entry.awaited), default=0)
            self._wait(lambda: self._accepted >= last, seconds)

    def forced(self) -> list[tuple[str, list[int]]]:
        """Return requests whose grammar allows one continuation only, and its tokens."""
        return [(self._by_number[number].name or "", tokens) for number, tokens in self._forced.items()]

    def late(self, names: Iterable[str], seconds: float) -> list[str]:
        """Return the requests whose masks are not written within `seconds`; `news` reports them later."""
        entries = [entry for name in names if (entry := self._open.get(name)) is not None]
        self._wait(lambda: all(map(self._has_mask, entries)), seconds)
        late = [entry for entry in entries if entry.ready and not self._has_mask(entry)]
        for entry in late:
            entry.awaited = True
        self._late += late
        return [entry.name or "" for entry in late]

    def masks(self, names: Sequence[str], drafts: Sequence[int] | None = None) -> Words:
        """Return masks [names, words] of the tokens that may come next, after `drafts` draft tokens of each request.

        All tokens are allowed for a request that has no grammar any more or whose process was lost.
        """
        out: Words = np.full((len(names), self.words), ALL_ALLOWED, np.uint32)
        for i, name in enumerate(names):
            entry = self._open.get(name)
            if entry is not None and entry.ready and self._process is not None:
                out[i] = self._process.masks[entry.row + (drafts[i] if drafts else 0)]
        return out

    # ---- the queue of grammars to open

    def _enqueue(self, name: str | None, rules: wire.Rules, tokens: list[int]) -> _OpenGrammar:
        self._numbers += 1
        entry = self._by_number[self._numbers] = _OpenGrammar(self._numbers, name, rules, tokens)
        self._queue.insert(0 if name is None else len(self._queue), entry)  # a check needs no row
        self._send_queue()
        return entry

    def _send_queue(self) -> None:
        """Open queued grammars. A suspected grammar is opened alone."""
        while self._queue and (self._rows or self._queue[0].name is None):
            entry = self._queue[0]
            if self._deadly and entry.grammar in self._deadly:
                self._refuse(self._queue.pop(0), DEADLY)
                continue
            if self._opening and any(other.suspected for other in (entry, *self._opening)):
                return
            if not self._spawn():
                return
            self._queue.pop(0)
            self._opening[entry] = time.monotonic()
            if entry.name is None:
                self._send(wire.Check(entry.number, entry.rules.params))
            else:
                entry.row = self._rows.pop()
                self._send(wire.Open(entry.number, entry.row, entry.rules, entry.tokens))

    def _forget(self, entry: _OpenGrammar) -> None:
        del self._by_number[entry.number]
        self._forced.pop(entry.number, None)
        self._tokens.pop(entry.number, None)
        self._drafts.pop(entry.number, None)
        self._opening.pop(entry, None)
        self._deferred.pop(entry, None)
        for line in (self._queue, self._lost, self._late):
            if entry in line:
                line.remove(entry)
        if entry.name in self._news.ready:
            self._news.ready.remove(entry.name or "")
        if entry.row >= 0:
            self._rows.append(entry.row)
            self._send(wire.Close([entry.number]))
        self._send_queue()

    def _refuse(self, entry: _OpenGrammar, error: str) -> None:
        """Report an error of the grammar."""
        if entry.name is None:
            entry.verdict = refusal(error)
        else:
            self._news.refused.append((entry.name, error))

    def _fail(self, entry: _OpenGrammar, error: str) -> None:
        if entry.name is None:
            entry.verdict = EngineError(error)
        else:
            self._news.failed.append((entry.name, f"structured outputs: {error}"))

    # ---- the process

    def _spawn(self, spare: bool = False) -> bool:
        if self._process is None and time.monotonic() >= self._next_start:
            try:
                self._process = Process(self._start, self.words, spare, self._gives_way)
            except OSError as error:
                logger.error("the grammar process does not start: %s", error)
                self._give_up(NO_START, self._fail)
        return self._process is not None

    def _send(self, command: wire.Command) -> None:
        """Send a command if there is a process; a new process receives everything."""
        if self._process is not None:
            self._process.mailbox.send(wire.encode(command))

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and self._process is not None and (left := deadline - time.monotonic()) > 0:
            self._read(left)

    def _read(self, wait: float) -> None:
        """Handle all messages, waiting up to `wait` seconds for the first."""
        process = self._process
        if process is None:
            time.sleep(max(0.0, min(wait, self._next_start - time.monotonic())))
            return
        if not process.mailbox.wait(max(0, math.ceil(1000 * wait))):
            return
        while self._process is process and (frame := process.mailbox.receive()) is not None:
            self._received_at = time.monotonic()
            self._handle(wire.decode_answer(frame), process)
        if process.mailbox.closed and self._process is process:
            self._lose("is gone", process.killed_from_outside())

    def _check_silence(self) -> None:
        """Replace a process that hangs or is stopped."""
        now = time.monotonic()
        if self._process is not None and self._opening:
            since = max(self._received_at, next(iter(self._opening.values())))
            if now - since > (COMPILE_TIMEOUT_S if self._process.started else CHECK_TIMEOUT_S):
                self._lose("does not answer")
        waiting = [when for _, when in islice(self._unanswered, 1)] + [min(self._deferred.values(), default=now)]
        if self._process is not None and now - max(self._received_at, min(waiting)) > STEP_TIMEOUT_S:
            self._lose("does not answer")

    def _handle(self, answer: wire.Answer, process: Process) -> None:
        match answer:
            case wire.WorkerStarted(None):
                process.started, self._failed_starts, self._killed_starts = True, 0, 0
            case wire.WorkerStarted(error):
                self._give_up(error or "", self._refuse)
            case wire.GrammarOpened(number, error, forced):
                entry = self._by_number.get(number)
                if entry is not None:
                    self._opened(entry, error, forced)
            case wire.Accepted(number, forced, failed):
                self._accepted = number
                for which, tokens in forced:
                    self._force(which, tokens, number)
                self._fail_all(failed)
            case wire.Masked(number, failed, deferred):
                self._masked = number
                self._defer(deferred)
                while self._unanswered and self._unanswered[0][0] <= number:
                    self._unanswered.popleft()
                self._fail_all(failed)
                self._wake()
            case wire.CaughtUp(which, number, tokens, error):
                entry = self._by_number.get(which)
                if entry is not None:
                    self._deferred.pop(entry, None)
                    self._force(which, tokens, number)
                    self._fail_all([] if error is None else [(which, error)])
                    self._wake()
            case wire.Slow(number, seconds):
                entry = self._by_number.get(number)
                if entry is not None:
                    self._charge(entry, seconds)

    def _opened(self, entry: _OpenGrammar, error: str | None, forced: list[int]) -> None:
        del self._opening[entry]
        entry.suspected = 0  # the new process has done what the lost one was asked for
        if error is not None:
            self._refuse(entry, error)
        else:
            entry.ready = True
            self._force(entry.number, forced, 0)
            if entry.name is not None:
                self._news.ready.append(entry.name)
        self._send_queue()

    def _force(self, number: int, tokens: list[int], message: int) -> None:
        """Note forced tokens after message `message`, unless the request has got tokens since."""
        entry = self._by_number.get(number)
        if tokens and entry is not None and entry.sent_in <= message:
            self._forced[number] = tokens

    def _fail_all(self, failed: Iterable[tuple[int, str]]) -> None:
        for number, error in failed:
            if number in self._by_number:
                self._refuse(self._by_number[number], error)

    def _defer(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            entry = self._by_number.get(number)
            if entry is not None:
                self._deferred.setdefault(entry, time.monotonic())

    def _has_mask(self, entry: _OpenGrammar) -> bool:
        return entry.sent_in <= self._masked and entry not in self._deferred

    def _wake(self) -> None:
        """Report late masks that are written."""
        for entry in [entry for entry in self._late if self._has_mask(entry)]:
            self._late.remove(entry)
            entry.awaited = False
            self._news.ready.append(entry.name or "")

    def _charge(self, entry: _OpenGrammar, seconds: float) -> None:
        """Count processor time of a request, and refuse all of its choices when they have used up its budget."""
        entry.slow += seconds
        choices = [other for other in self._open.values() if other.request == entry.request]
        spent, tokens = sum(choice.slow for choice in choices), sum(len(choice.tokens) for choice in choices)
        if spent > MAX_MASK_CPU_S + MAX_MASK_CPU_S_PER_TOKEN * tokens:
            for choice in choices:
                self._refuse(choice, TOO_SLOW.format(spent, tokens))

    # ---- a lost process

    def _lose(self, why: str, killed: bool = False) -> None:
        """End the process. Its requests are opened again in `_reopen`: some of their tokens may not have been sent yet."""
        process, self._process = self._process, None
        assert process is not None
        self.losses += 1
        known = [entry for entry in self._by_number.values() if entry.ready or entry in self._opening]
        logger.warning("the grammar process %s (exit status %s); %d requests wait for another", why, process.end(), len(known))
        if process.started:
            at_work = [entry for entry in known if entry in self._opening or not self._has_mask(entry)]
            if killed:
                self._count_kill(at_work)
            else:
                self._suspect(at_work)
        else:
            self._count_start(killed)
        self._news.lost += [entry.name for entry in known if entry.ready and entry.name is not None]
        self._news.ready = []
        for entry in known:
            self._rows += [] if entry.row < 0 else [entry.row]
            entry.row, entry.ready, entry.awaited, entry.sent_in = -1, False, False, 0
        self._lost += known
        self._tokens, self._drafts, self._forced, self._opening, self._deferred, self._late = {}, {}, {}, {}, {}, []
        self._unanswered.clear()
        self._accepted = self._masked = self._sent

    def _suspect(self, at_work: list[_OpenGrammar]) -> None:
        """Suspect the grammars that the process was working on. One that was alone the second time is deadly."""
        for entry in at_work:
            entry.losses += 1
            entry.suspected += 1
        if len(at_work) == 1 and at_work[0].suspected >= MAX_DEATHS:
            self._deadly.add(at_work[0].grammar)

    def _count_kill(self, at_work: list[_OpenGrammar]) -> None:
        """Count a kill from outside. The kernel kills, too, when a grammar takes all memory: a request is at fault only if it
        makes no progress between two kills."""
        for entry in at_work:
            entry.losses = 1 + (0 if len(entry.tokens) > entry.tokens_at_kill else entry.losses)
            entry.tokens_at_kill = len(entry.tokens)

    def _count_start(self, killed: bool) -> None:
        """Count a process that ended before it was ready."""
        now = time.monotonic()
        if killed:
            self._killed_since = self._killed_since if self._killed_starts else now
            self._killed_starts += 1
            pause = RESTART_PAUSE_S * 2 ** min(self._killed_starts - 1, 16)
            self._next_start = now + min(pause, MAX_RESTART_PAUSE_S)
        else:
            self._failed_starts += 1

    @property
    def _start_is_hopeless(self) -> bool:
        killed_for = time.monotonic() - self._killed_since if self._killed_starts else 0.0
        return self._failed_starts >= MAX_FAILED_STARTS or killed_for > MAX_KILLED_STARTS_S

    def _reopen(self) -> None:
        """Queue the requests of a lost process again, suspected grammars last."""
        if not self._lost:
            return
        lost, self._lost = self._lost, []
        for entry in lost:
            if entry.losses >= MAX_LOSSES:
                self._fail(entry, LOST)
        self._queue = [entry for entry in lost if entry.losses < MAX_LOSSES] + self._queue
        self._queue.sort(key=lambda entry: entry.suspected)
        if self._start_is_hopeless:
            self._give_up(NO_START, self._fail)
        self._send_queue()

    def _give_up(self, error: str, report: Callable[[_OpenGrammar, str], None]) -> None:
        """Fail all waiting requests: no process can be started."""
        self.stop()
        waiting, self._queue, self._opening = [*self._opening, *self._queue], [], {}
        self._failed_starts = self._killed_starts = 0
        for entry in waiting:
            report(entry, error)


def fingerprint(params: StructuredOutputsParams) -> bytes:
    """Return a digest that is equal for equal grammars."""
    return hashlib.sha256(wire.key_of(params)).digest()


def refusal(error: str) -> InvalidParameter:
    return InvalidParameter(f"{FIELD}: {error}", FIELD)
