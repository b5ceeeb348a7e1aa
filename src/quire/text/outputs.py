"""Token deltas in, request outputs out: detokenization, stop strings, logprobs, and joining n completions.

The engine is known here by its deltas only; a stop string found here is reported back as a request to abort.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from quire.text.detokenizer import CONTEXT, StopStrings, TokenTexts, new_detokenizer
from quire.text.inputs import PreparedRequest
from quire.text.pacing import Pace
from quire.text.tokenizer import Tokenizer
from quire.types.errors import RequestError
from quire.types.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenDelta,
    TokenLogprobs,
)
from quire.types.plan import Floats, TopLogprobs
from quire.types.request import FinishReason
from quire.types.sampling import RequestOutputKind, SamplingParams
from quire.types.stats import Arrived, Finished, OutputNews, OutputObserver

logger = logging.getLogger(__name__)

TOKENS_AT_ONCE = 64  # that become text together, in an answer that is sent as a whole
TOKEN_BYTES = 40  # of memory, of one token id in a list
LOGPROB_BYTES = 240  # of memory, of one alternative of a token: object, float and text

_LogprobTable = list[TokenLogprobs | None] | FlatLogprobs


@dataclass(frozen=True)
class Processed:
    outputs: list[RequestOutput]
    aborts: list[str]  # engine requests that ended here (stop string, error), and that the engine must abort


@dataclass(frozen=True)
class Absorbed:
    due: "Iterable[RequestAnswer]"  # answers with a new output
    aborts: list[str]  # as in `Processed`


class OutputProcessor:
    """Turn token deltas into RequestOutputs: detokenize, find stop strings, and report ends that the text decides.

    observers: called for every request and every batch of deltas; the list may grow later
    """

    def __init__(self, tokenizer: Tokenizer | None, observers: Sequence[OutputObserver] = (), page_size: int = 0) -> None:
        """page_size: tokens of a page of the prefix cache; 0: there is none"""
        self._tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._others: WeakKeyDictionary[Tokenizer, TokenTexts] = WeakKeyDictionary()  # of adapters
        self.page_size = page_size
        self._observers = observers
        self._answers: dict[str, RequestAnswer] = {}  # by user request id
        self._owners: dict[str, tuple[RequestAnswer, _GrowingChoice]] = {}  # by engine request id

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._answers

    def add(
        self, prepared: PreparedRequest, trace_headers: Mapping[str, str] | None = None, arrived: float | None = None
    ) -> "RequestAnswer":
        """Take in a request. arrived: when the user sent it, if that was before now (time.monotonic())."""
        answer = RequestAnswer(self, prepared, trace_headers, time.monotonic() if arrived is None else arrived)
        self._answers[prepared.id] = answer
        for choice, request in zip(answer.choices, prepared.requests, strict=True):
            self._owners[request.id] = (answer, choice)
        if self._observers:
            self._announce(prepared)
        return answer

    def observe(self, observer: OutputObserver) -> None:
        self._observers = [*self._observers, observer]

    def user_id(self, engine_id: str) -> str | None:
        """Return the user's id of an open engine request."""
        answer = self.owner(engine_id)
        return None if answer is None else answer.prepared.id

    def owner(self, engine_id: str) -> "RequestAnswer | None":
        """Return the answer that this open engine request is part of."""
        owner = self._owners.get(engine_id)
        return None if owner is None else owner[0]

    def engine_ids(self, request_id: str) -> list[str]:
        """Return the engine requests of a user's request that are still open."""
        answer = self._answers.get(request_id)
        return [] if answer is None else [r.id for r in answer.prepared.requests if r.id in self._owners]

    def choice_id(self, request_id: str, index: int) -> str | None:
        """Return the engine request of one choice of a user's request; None once it has ended."""
        answer = self._answers.get(request_id)
        engine_id = None if answer is None else answer.prepared.requests[index].id
        return engine_id if engine_id in self._owners else None

    def forget(self, request_id: str) -> list[str]:
        """Drop a user's request; return its engine requests that are still open."""
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return []
        answer.metrics.finished_ts = now = time.monotonic()
        if self._observers:
            with suppress(RequestError):  # of the tokenizer
                answer.read()
            self._tell(OutputNews(now, finished=[answer.finish()], engine=answer.engine))
        return [r.id for r in answer.prepared.requests if self._owners.pop(r.id, None) is not None]

    def adapters(self) -> tuple[list[str], list[str]]:
        """Return the names of adapters whose requests wait for their first token, and of those whose requests have it."""
        named = [(answer.prepared.lora_name, answer.metrics.first_token_ts) for answer in self._answers.values()]
        waiting = {name for name, begun in named if name and not begun}
        return sorted(waiting), sorted({name for name, begun in named if name and begun})

    def process(self, deltas: Iterable[TokenDelta], engine: int = 0) -> Processed:
        absorbed = self.absorb(deltas, engine)
        return Processed([answer.emit() for answer in absorbed.due], absorbed.aborts)

    def absorb(self, deltas: Iterable[TokenDelta], engine: int = 0) -> Absorbed:
        """Absorb deltas. The caller takes outputs from the answers when a client is ready for them.

        engine: number of the engine that sent them."""
        news = OutputNews(now := time.monotonic(), engine=engine)
        due: dict[RequestAnswer, None] = {}
        aborts = []
        for delta in deltas:
            owner = self._owners.get(delta.request_id)
            if owner is None:
                continue  # ended here by a stop string while its last rows were in flight
            answer, choice = owner
            try:
                answer.note(delta, choice, news)
                choice.feed(delta)
            except Exception as error:
                logger.exception("no output could be made of the tokens of request %r", answer.prepared.id)
                choice.finish_reason, choice.error = "error", f"{type(error).__name__}: {error}"
            if choice.finish_reason is not None:
                del self._owners[delta.request_id]
                if delta.finish_reason is None:
                    aborts.append(delta.request_id)
                answer.unfinished -= 1
                if not answer.unfinished:
                    del self._answers[answer.prepared.id]
                    answer.metrics.finished_ts = now
                    if self._observers:
                        news.finished.append(answer.finish())
            if not answer.unfinished if answer.final_only else answer.due or choice.due():
                answer.due = True
                due[answer] = None
        if self._observers:
            self._tell(news)
        return Absorbed(due, aborts)

    def tools_for(self, prepared: PreparedRequest) -> "tuple[Tokenizer | None, TokenTexts | None]":
        """Return the tokenizer and token texts for a request; None and None if it wants no text."""
        if not prepared.params.detokenize:
            return None, None
        return (self._tokenizer, self._texts) if prepared.tokenizer is None else self._others_tools(prepared.tokenizer)

    def _others_tools(self, other: Tokenizer) -> tuple[Tokenizer, TokenTexts]:
        """Return them for an adapter that has its own tokenizer."""
        if other not in self._others:
            self._others[other] = TokenTexts(other)
        return other, self._others[other]

    def _announce(self, prepared: PreparedRequest) -> None:
        arrival = Arrived(prepared.id, prepared.prompt, prepared.prompt_ids, prepared.params, prepared.lora_name)
        for observer in self._observers:
            try:
                observer.on_arrival(arrival)
            except Exception:
                logger.exception("an observer failed")

    def _tell(self, news: OutputNews) -> None:
        for observer in self._observers:
            try:
                observer.on_outputs(news)
            except Exception:
                logger.exception("an observer failed")


class RequestAnswer:
    """One user request: its n choices and its times. Its next output has everything new since the last one."""

    def __init__(
        self, owner: OutputProcessor, prepared: PreparedRequest, trace_headers: Mapping[str, str] | None, arrived: float
    ) -> None:
        self.prepared = prepared
        self._owner = owner
        tokenizer, self._texts = owner.tools_for(prepared)
        self._trace_headers = trace_headers
        self.choices = [_GrowingChoice(i, prepared, tokenizer, self._texts) for i in range(len(prepared.requests))]
        self.metrics = RequestMetrics(arrival_time=prepared.requests[0].arrival, queued_ts=arrived)
        self.cached_tokens = 0
        self.engine = 0  # the one that sent its latest delta
        self.unfinished = len(self.choices)
        self.due = False  # is there an output to emit?
        self.final_only = prepared.params.output_kind is RequestOutputKind.FINAL_ONLY
        self._delta = prepared.params.output_kind is RequestOutputKind.DELTA
        self._prompt_ids = list(prepared.prompt_ids)
        self._pooled: Floats | None = None
        self._prompt_logprobs: _LogprobTable | None = None
        if prepared.params.prompt_logprobs is not None:
            self._prompt_logprobs = _new_table(prepared.params)
            self._prompt_logprobs.append(None)  # nothing comes before the first token
        self._unread: deque[tuple[TopLogprobs, int]] = deque()  # chunks of prompt logprobs, and how far each is read

    def note(self, delta: TokenDelta, choice: "_GrowingChoice", news: OutputNews) -> None:
        metrics, now, count = self.metrics, news.now, len(delta.token_ids)
        self.engine = news.engine
        if delta.prompt_logprobs or not metrics.first_token_ts:
            self._note_prompt(delta)
        if delta.preemptions > metrics.num_preemptions:
            metrics.num_preemptions = delta.preemptions
        if delta.drafts is not None:
            choice.count_drafts(delta.drafts, metrics)
        if not count and delta.pooled is None:
            return
        if not metrics.first_token_ts:
            metrics.first_token_ts = now
            metrics.first_token_latency = now - metrics.queued_ts
            news.first_tokens.append(metrics.first_token_latency)
            news.prompts.append((len(self.prepared.prompt_ids), self.cached_tokens))
        if choice.last_token_ts:
            news.intervals.append(now - choice.last_token_ts)
        choice.last_token_ts = metrics.last_token_ts = now
        metrics.num_generation_tokens += count
        news.tokens += count

    def _note_prompt(self, delta: TokenDelta) -> None:
        """Record prompt results. The choices share them; the first one reports them."""
        metrics = self.metrics
        if delta.scheduled_at and not metrics.scheduled_ts:
            metrics.scheduled_ts = delta.scheduled_at
        if delta.request_id == self.prepared.requests[0].id:
            if not metrics.first_token_ts:  # later a restarted engine may find other things cached
                self.cached_tokens = delta.cached_tokens
            self._unread.extend((chunk, 0) for chunk in delta.prompt_logprobs)
            self._pooled = delta.pooled

    def read(self) -> None:
        """Add the text of all tokens so far."""
        for choice in self.choices:
            choice.read()

    def finish(self) -> Finished:
        """The whole request for observers; choices that have not ended were given up."""
        return Finished(
            request_id=self.prepared.id,
            prompt_tokens=len(self.prepared.prompt_ids),
            cached_tokens=self.cached_tokens,
            params=self.prepared.params,
            metrics=self.metrics,
            reasons=tuple(choice.finish_reason or "abort" for choice in self.choices),
            generated=tuple(len(choice.token_ids) for choice in self.choices),
            texts=tuple(choice.text for choice in self.choices),
            trace_headers=self._trace_headers,
            engine_ids=tuple(request.id for request in self.prepared.requests),
            lora_name=self.prepared.lora_name,
            pools=self.prepared.requests[0].extras.pooling is not None,
        )

    def emit(self) -> RequestOutput:
        """All that is due. Called when something is."""
        self.due = False
        while self._unread:
            self.catch_up()
        choices = [choice for choice in self.choices if choice.due()] if self._delta else self.choices
        return RequestOutput(
            request_id=self.prepared.id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[choice.take(self._delta) for choice in choices],
            finished=not self.unfinished,
            metrics=self.metrics,
            lora_request=self.prepared.lora_request,
            num_cached_tokens=self.cached_tokens,
            num_cache_creation_tokens=self._created_tokens(),
            pooled=self._pooled,
        )

    def _created_tokens(self) -> int:
        """Prompt tokens in whole pages that the prefix cache did not have: others can use them now."""
        size, length = self._owner.page_size, len(self.prepared.prompt_ids)
        return max(0, length // size * size - self.cached_tokens) if size and self.metrics.first_token_ts else 0

    @property
    def unread_bytes(self) -> int:
        """Approximate memory of the next output; it grows until an output is taken."""
        return sum(choice.unread_bytes for choice in self.choices)

    @property
    def behind(self) -> bool:
        """Are there prompt logprobs to be read before the next output?"""
        return bool(self._unread)

    def catch_up(self, entries: int = 512) -> None:
        """Read about this many of them. A preempted request runs its prompt again: no position is reported twice."""
        table = self._prompt_logprobs
        chunk, begin = self._unread.popleft()
        if table is None:
            return
        needed = min(len(chunk.rank), begin + len(self.prepared.prompt_ids) - len(table))
        end = min(needed, begin + max(1, entries // chunk.ids.shape[1]))
        for i in range(begin, end):
            before = self._prompt_ids[max(0, len(table) - CONTEXT) : len(table)]
            table.append(read_logprobs(chunk, i, self._texts, before, ranked=True))
        if end < needed:
            self._unread.appendleft((chunk, end))


@dataclass(slots=True)
class _Sent:
    """How far a stream has been sent."""

    tokens: int = 0
    text: int = 0
    logprobs: int = 0
    finish: bool = False


_NOTHING = _Sent()


@dataclass
class _GrowingChoice:
    """One completion as it grows."""

    index: int
    prepared: PreparedRequest
    tokenizer: Tokenizer | None  # None: the output has no text
    texts: TokenTexts | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    last_token_ts: float = 0.0
    drafts: tuple[int, int, int] = (0, 0, 0)  # as the engine counts them
    sent: _Sent = field(default_factory=_Sent)

    def __post_init__(self) -> None:
        params = self.prepared.params
        self.params: SamplingParams = params
        self.logprobs = _new_table(params) if params.wants_logprobs else None
        self._detokenizer = None
        if self.tokenizer is not None:
            self._detokenizer = new_detokenizer(
                self.tokenizer,
                prompt=self.prepared.prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._interval = params.stream_interval or 1
        self._unread: list[int] = []  # tokens that are not in the text yet
        self._at_once = TOKENS_AT_ONCE if params.output_kind is RequestOutputKind.FINAL_ONLY else 1
        self._stops = StopStrings(params.stops, include=params.include_stop_str_in_output) if params.stops else None

    def count_drafts(self, drafts: tuple[int, int, int], metrics: RequestMetrics) -> None:
        """A restarted engine counts from zero."""
        before = self.drafts if all(new >= old for new, old in zip(drafts, self.drafts, strict=True)) else (0, 0, 0)
        self.drafts = drafts
        metrics.num_spec_steps += drafts[0] - before[0]
        metrics.num_draft_tokens += drafts[1] - before[1]
        metrics.num_accepted_draft_tokens += drafts[2] - before[2]

    def feed(self, delta: TokenDelta) -> None:
        if self._detokenizer is None and self.logprobs is None:
            self.token_ids += delta.token_ids
        elif self.logprobs is None and self._stops is None:
            self._gather(delta)
        else:
            self._read(delta)
        if delta.finish_reason is not None and self.finish_reason is None:
            self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
            self._end_text()

    def _gather(self, delta: TokenDelta) -> None:
        """Take tokens whose text decides nothing, so that many of them can be read at once."""
        self.token_ids += delta.token_ids
        self._unread += delta.token_ids
        if delta.token_ids and delta.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            self._unread.pop()  # the token that ended it is counted, but is not text
        if len(self._unread) >= self._at_once:
            self.read()

    def read(self) -> None:
        """Add the text of all tokens so far."""
        if self._unread:
            ids, self._unread = self._unread, []
            self._add_text(ids)

    def _read(self, delta: TokenDelta) -> None:
        """Text and logprobs; ends with the token that completes a stop string."""
        for i, token in enumerate(delta.token_ids):
            self.token_ids.append(token)
            if self.logprobs is not None:
                self._add_logprobs(delta.logprobs[i])
            last = i == len(delta.token_ids) - 1 and delta.finish_reason == "stop"
            if last and not self.params.include_stop_str_in_output:
                break  # the token that ended it is counted, but is not text
            self._add_text([token])
            if self.finish_reason is not None:
                return

    def due(self) -> bool:
        """Is there news the user should get now? (stream_interval thins it out; the first token and the finish always go.)"""
        if self.finish_reason is not None:
            return not self.sent.finish
        new = len(self.token_ids) - self.sent.tokens
        return new >= self._interval or (new > 0 and not self.sent.tokens)

    @property
    def unread_bytes(self) -> int:
        sent, table = self.sent, self.logprobs
        size = len(self.text) - sent.text + TOKEN_BYTES * (len(self.token_ids) - sent.tokens)
        if table is not None and len(table) > sent.logprobs:
            size += LOGPROB_BYTES * (len(table) - sent.logprobs) * len(table[-1] or ())
        return size

    def take(self, delta: bool) -> CompletionOutput:
        sent = self.sent if delta else _NOTHING
        output = CompletionOutput(
            index=self.index,
            text=self.text[sent.text :],
            token_ids=self.token_ids[sent.tokens :],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[sent.logprobs :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            lora_request=self.prepared.lora_request,
            error=self.error,
        )
        sent = self.sent
        sent.tokens, sent.text, sent.finish = len(self.token_ids), len(self.text), self.finish_reason is not None
        if self.logprobs is not None and delta:  # they take far more memory than tokens and text, and are not needed again
            self.logprobs = _new_table(self.params)
        elif self.logprobs is not None:
            sent.logprobs = len(self.logprobs)
        return output

    def _add_text(self, ids: list[int]) -> None:
        if self._detokenizer is not None:
            self._emit(self._detokenizer.feed(ids))

    def _end_text(self) -> None:
        self.read()
        if self._detokenizer is not None:
            self._emit(self._detokenizer.finish())
        if self._stops is not None and isinstance(self.stop_reason, int | None):
            self.text += self._stops.finish()

    def _emit(self, text: str) -> None:
        """Text before min_tokens is not searched for stop strings."""
        if self._stops is None or len(self.token_ids) < self.params.min_tokens:
            self.text += text
            return
        emitted, stop = self._stops.feed(text)
        self.text += emitted
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _add_logprobs(self, top: TopLogprobs) -> None:
        assert self.logprobs is not None
        self.cumulative_logprob += float(top.values[0, 0])
        ranked = self.params.logprob_token_ids is None
        before = self.token_ids[-CONTEXT - 1 : -1]
        if len(before) < CONTEXT:
            before = [*self.prepared.prompt_ids[len(before) - CONTEXT :], *before]
        self.logprobs.append(read_logprobs(top, 0, self.texts, before, ranked=ranked))


def _new_table(params: SamplingParams) -> _LogprobTable:
    return FlatLogprobs() if params.flat_logprobs else []


def read_logprobs(
    top: TopLogprobs, position: int, texts: TokenTexts | None, before: Sequence[int], ranked: bool
) -> TokenLogprobs:
    """The chosen token first, then the alternatives; `ranked`: the alternatives are the best ones in order.

    `before` are the last tokens in front of them.
    """
    out: TokenLogprobs = {}
    for column, (token, value) in enumerate(zip(top.ids[position].tolist(), top.values[position].tolist(), strict=True)):
        if token in out:
            continue
        rank = int(top.rank[position]) if column == 0 else (column if ranked else None)
        decoded = None if texts is None else texts.of(token, before)
        out[token] = Logprob(logprob=value, rank=rank, decoded_token=decoded)
    return out


class Stream:
    """The outputs of one request. An output is made when it is taken, of everything new, so slow readers lose nothing."""

    __slots__ = ("_error", "_waiter", "answer")

    def __init__(self, answer: RequestAnswer) -> None:
        self.answer = answer
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()

    def news(self) -> "asyncio.Future[None]":
        """To be awaited while there is no output."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


async def catch_up(answer: RequestAnswer) -> None:
    pace = Pace()
    while answer.behind:
        await pace()
        answer.catch_up()
