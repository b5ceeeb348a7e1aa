"""From a checked request to the engine's outputs, and what an answer reports of them: usage, timings and the fingerprint.

Each prompt is one engine request. All of them end together, also after an error.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from quire.obs.logs import log_piece
from quire.serve.batches.calls import is_batch_line
from quire.serve.body import stop
from quire.serve.errors import FieldNames, GenerationFailed, field_names_of
from quire.serve.inputs import max_tokens_for, sampling_params
from quire.serve.limits import UNREAD_BYTES
from quire.serve.protocol import GenerationFields, StreamOptions, Timing, Usage
from quire.serve.server import Server, answer_id, priority_of, rank_of
from quire.types.errors import NO_TOKEN, RequestError
from quire.types.outputs import RequestMetrics, RequestOutput
from quire.types.prompts import Extras, Prompt
from quire.types.sampling import SamplingParams

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
_serials = itertools.count()
AT_ONCE = 16  # prompts of a request that are begun together
_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True)
class GenerationJob:
    """One HTTP request's work."""

    id: str  # of the answer, as the client sees it
    model: str
    prompts: list[Prompt]
    params: list[SamplingParams]  # one per prompt
    priority: int
    cache_tenant: str | None  # prompts are shared in the prefix cache within this tenant
    trace_headers: dict[str, str] | None
    timed: bool  # the answer carries its times
    at_once: bool  # the engine gets it before other requests of this turn of the event loop are read
    field_names: FieldNames  # of its errors
    rank: int | None = None  # the engine that runs the job, of several
    created: int = field(default_factory=lambda: int(time.time()))
    engine_ids: list[str] = field(default_factory=list)  # of the engine requests that have started

    @property
    def n(self) -> int:
        return self.params[0].n

    @property
    def refusable(self) -> bool:
        """Return whether the engine may refuse the request: it has a grammar or extra_args, the same for all prompts. The first
        output shows that it was accepted.
        """
        return self.params[0].structured_outputs is not None or self.params[0].extra_args is not None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def media_tokens(self) -> dict[str, int]:
        """Return the prompt tokens that stand for media, by kind."""
        found: dict[str, int] = {}
        for item in (item for prompt in self.prompts for item in prompt.extras.media):
            found[item.modality] = found.get(item.modality, 0) + item.length
        return found


def make_job(
    server: Server, raw: Request, request: GenerationFields, prefix: str, model: str, prompts: Sequence[Prompt]
) -> GenerationJob:
    llm, defaults, extras = server.llm, server.llm.default_sampling, server.extras(model)
    params = [sampling_params(request, max_tokens_for(request, llm.prompts, prompt, defaults), defaults) for prompt in prompts]
    traced = {name: value for name in _TRACE_HEADERS if (value := raw.headers.get(name)) is not None}
    job = GenerationJob(
        id=answer_id(prefix, raw, request),
        model=model,
        prompts=[_with_extras(prompt, extras) for prompt in prompts],
        params=params,
        priority=priority_of(raw, request, llm.config.policy),
        cache_tenant=getattr(raw.state, "tenant", None),
        trace_headers=traced or None,
        timed=server.wants_timing(raw),
        at_once=len(prompts) == 1 and not is_batch_line(raw.scope),
        field_names=field_names_of(request),
        rank=rank_of(raw, llm),
    )
    ids = job.engine_ids  # without the job, whose media must not live as long as an idle connection
    raw.scope["state"][UNREAD_BYTES] = lambda: sum(map(llm.unread_bytes, ids))
    return job


def _with_extras(prompt: Prompt, extras: Extras) -> Prompt:
    if prompt.extras.lora or prompt.extras.media or prompt.extras is extras:
        return prompt
    return replace(prompt, extras=extras)


def run(server: Server, job: GenerationJob) -> Outputs:
    """Yield outputs of all prompts, each with its prompt's number. Closing the generator aborts the requests in the engine."""
    streams = [_start(server, job, i) for i in range(len(job.prompts))]
    return _number(streams[0], job.field_names) if len(streams) == 1 else _merge(streams, job.field_names)


async def collect(server: Server, job: GenerationJob) -> list[RequestOutput]:
    """The final output of every prompt, in order."""
    final: dict[int, RequestOutput] = {}
    async with aclosing(run(server, job)) as outputs:
        async for i, output in outputs:
            raise_failure(output)
            final[i] = output
    return [final[i] for i in range(len(job.prompts))]


def log_delta(server: Server, job: GenerationJob, output: RequestOutput) -> None:
    """Log the delta of a stream if the settings ask for it."""
    settings = server.settings
    if settings.enable_log_outputs and settings.enable_log_deltas:
        for part in output.outputs:
            log_piece(job.id, part.index, part.text, part.finish_reason, settings.max_log_len)


def raise_failure(output: RequestOutput) -> None:
    for choice in output.outputs:
        if choice.finish_reason == "error":
            reason = (choice.error or "no reason given").splitlines()[0]
            raise RequestError(NO_TOKEN) if reason == NO_TOKEN else GenerationFailed(reason)


def _start(server: Server, job: GenerationJob, i: int) -> AsyncGenerator[RequestOutput, None]:
    # clients may use an id twice, the engine may not
    engine_id = f"{job.id}-{i}-{next(_serials):x}"
    job.engine_ids.append(engine_id)
    return server.llm.generate(
        job.prompts[i],
        job.params[i],
        engine_id,
        priority=job.priority,
        cache_tenant=job.cache_tenant,
        trace_headers=job.trace_headers,
        at_once=job.at_once,
        data_parallel_rank=job.rank,
    )


def answer_of(engine_id: str) -> tuple[str, int | None]:
    """Return the answer's id and the prompt's number of an engine request; the number is None for the server's own."""
    parts = engine_id.rsplit("-", 2)
    return (parts[0], int(parts[1])) if len(parts) == 3 and parts[1].isdigit() else (engine_id, None)


async def _number(stream: AsyncGenerator[RequestOutput, None], field_names: FieldNames) -> Outputs:
    async with aclosing(stream):
        try:
            async for output in stream:
                yield 0, output
        except RequestError as error:
            raise field_names.of(error) from error


async def _merge(streams: Sequence[AsyncGenerator[RequestOutput, None]], field_names: FieldNames) -> Outputs:
    """Yield from all streams. The queue is short, so a slow reader slows its own streams instead of filling memory."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(i: int) -> None:
        end: Exception | None = None
        try:
            async with aclosing(streams[i]) as stream:
                async for output in stream:
                    await queue.put((i, output))
        except Exception as error:
            end = error
        await queue.put((i, end))

    pumps: list[asyncio.Task[None]] = []

    async def start() -> None:
        """Start some at a time, so that other work of the event loop runs in between."""
        for i in range(len(streams)):
            pumps.append(asyncio.create_task(pump(i)))
            if i % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)

    starting = asyncio.create_task(start())
    try:
        running = len(streams)
        while running:
            i, item = await queue.get()
            if isinstance(item, RequestError):
                raise field_names.of(item) from item
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield i, item
    finally:
        await stop(starting)
        await stop(*pumps)


# ---- token usage and timings


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None,
    reasoning_tokens: int | None = None,
    media_tokens: Mapping[str, int] | None = None,
) -> Usage:
    """None: left out. media_tokens: shown with the cached ones"""
    usage: Usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        if media_tokens:
            usage["prompt_tokens_details"]["multimodal_tokens"] = dict(media_tokens)
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": min(reasoning_tokens, completion_tokens)}
    return usage


def timing_of(metrics: RequestMetrics | None, speculates: bool = False) -> Timing | None:
    """Return the timings of an answer. speculates: the engine uses speculative decoding."""
    if metrics is None:
        return None
    queued, scheduled = metrics.queued_ts, metrics.scheduled_ts
    first, last, tokens = metrics.first_token_ts, metrics.last_token_ts, metrics.num_generation_tokens
    generation = _between(first, last)
    running = _between(scheduled, last)
    timing: Timing = {
        "time_to_first_token_ms": _between(queued, first),
        "generation_time_ms": generation,
        "queue_time_ms": _between(queued, scheduled),
        "prefill_time_ms": _between(scheduled, first),
        "mean_itl_ms": generation / (tokens - 1) if generation is not None and tokens > 1 else None,
        "tokens_per_second": tokens / running * 1000 if running else None,
        "preemptions": metrics.num_preemptions,
    }
    if speculates or metrics.num_spec_steps:
        steps, drafts, accepted = metrics.num_spec_steps, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
        timing["speculative_decoding"] = {
            "num_spec_steps": steps,
            "num_draft_tokens": drafts,
            "num_accepted_draft_tokens": accepted,
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafts if drafts else 0.0,
        }
    return timing


def _between(start: float, end: float) -> float | None:
    """Return milliseconds; None if one of the times is 0 (not reached)."""
    return max(0.0, end - start) * 1000 if start and end else None


class StreamUsage:
    """Usage and timings of a stream: in a last chunk on request (`include_usage`), else with its last choice."""

    def __init__(self, server: Server, job: GenerationJob, options: StreamOptions | None) -> None:
        forced = server.settings.enable_force_include_usage
        self.include_usage = forced or (options is not None and bool(options.include_usage))
        self._in_every_chunk = forced or (self.include_usage and options is not None and bool(options.continuous_usage_stats))
        self._server = server
        self._job = job
        self._cached = [0] * len(job.prompts)
        self._open = len(job.prompts) * job.n
        self._last: RequestOutput | None = None

    def note(self, prompt: int, output: RequestOutput) -> None:
        self._cached[prompt] = output.num_cached_tokens
        self._last = output

    def mark(self, chunk: dict[str, Any], prompt: int, tokens: int, finished: bool) -> dict[str, Any]:
        """Add usage and timings to a chunk of one choice, which has `tokens` so far, as the request asks for."""
        if self._in_every_chunk:
            chunk["usage"] = usage_of(len(self._job.prompts[prompt].ids), tokens, None)
        if finished and not self.include_usage:
            self._open -= 1
            chunk["system_fingerprint"] = self._server.fingerprint
            if self._open == 0:
                chunk |= self._times()
        return chunk

    def final(self, tokens: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Return the content of the usage chunk."""
        cached = self._server.reported_cached(sum(self._cached))
        usage = usage_of(self._job.prompt_tokens, tokens, cached, reasoning_tokens, self._job.media_tokens)
        return {"usage": usage, "system_fingerprint": self._server.fingerprint, **self._times()}

    def _times(self) -> dict[str, Any]:
        """Return the timings of a single choice; several choices together have none."""
        if not self._job.timed or len(self._cached) * self._job.n > 1 or self._last is None:
            return {}
        return {"metrics": timing_of(self._last.metrics, self._server.speculates)}
