"""Inputs of a pooling request become prompts, and prompts become the engine's results.

All inputs are checked and tokenized before the first one is computed, so a bad input costs no computation. The inputs of one
HTTP request are one engine request each; all of them end together, also after an error.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fastapi import Request, Response

from quire.features.pooling.host import ModelPooling, Role, pooling_of
from quire.features.pooling.late_interaction import find_role, role_reader
from quire.features.pooling.requests import unpooled_tokens
from quire.serve.errors import GenerationFailed, json_response
from quire.serve.inputs import render_messages
from quire.serve.limits import refuse_more
from quire.serve.pooling.protocol import InputFields, PoolingFields, PoolingUsage
from quire.serve.protocol import TemplateFields
from quire.serve.server import Server, answer_id, priority_of, rank_of
from quire.text.pacing import LazyList
from quire.text.prompts import PromptReader
from quire.text.workers.wire import Cut
from quire.types.checks import shown
from quire.types.errors import InvalidParameter, PromptTooLong, RequestError
from quire.types.pooling import NOT_FINITE, PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.prompts import Extras, Prompt

MAX_INPUTS = 2048  # OpenAI's limit
FEW_VALUES = 1 << 14  # values that are encoded in one turn of the event loop
AT_ONCE = 16  # texts that are tokenized, and prompts that are begun, in one turn of the event loop
Result = PoolingRequestOutput[PoolingOutput]
_TRACE_HEADERS = ("traceparent", "tracestate")
_serials = itertools.count()


# ---- inputs → prompts


class Cutting(Protocol):
    """Truncation, as all requests have it."""

    truncate_prompt_tokens: int | None
    truncation_side: Any


@dataclass(frozen=True)
class InputReader:
    """Turns the texts and token ids of one request into prompts. `parameter`: the field that errors name."""

    server: Server
    prompts: PromptReader
    extras: Extras
    cache_salt: str | None = None
    shorten: str = "send truncate_prompt_tokens"  # what a client may do with a text that is too long

    @classmethod
    async def of(cls, server: Server, model: str | None, cache_salt: str | None = None) -> "InputReader":
        prompts, extras = await server.prompts(model)
        return cls(server, prompts, extras, cache_salt)

    @property
    def longest(self) -> int:
        return self.prompts.max_model_len

    @property
    def lower_case(self) -> bool:
        """Whether the files of sentence-transformers ask for texts in lower case."""
        files = model_pooling(self.server).files
        return files is not None and files.lower_case

    def special(self, add_special_tokens: bool) -> tuple[int, int]:
        """Return how many special tokens stand before and after a text."""
        if self.prompts.tokenizer is None or not add_special_tokens:
            return 0, 0
        template = self.prompts.tokenizer.template
        return len(template.before), len(template.after)

    def cuts_right(self, side: str | None) -> bool:
        """Return whether the end of a long text is cut off rather than its beginning."""
        tokenizer = self.prompts.tokenizer
        return (side or (tokenizer.init_kwargs.get("truncation_side") if tokenizer else None) or "right") == "right"

    def cut(self, request: Cutting, special: tuple[int, int]) -> Cut:
        keep, right = request.truncate_prompt_tokens, self.cuts_right(request.truncation_side)
        if keep is None:
            return Cut(self.longest)
        return Cut(self.longest, self.kept(keep, "truncate_prompt_tokens", sum(special)), right, *special)

    def kept(self, keep: int, parameter: str, special: int = 0) -> int:
        """Return how many tokens are kept where a request asks for `keep`, of which some are special."""
        if keep == -1:
            return self.longest
        if keep <= special:
            raise InvalidParameter(
                f"{parameter} must be at least {special + 1}, since the model adds {special} special tokens; got {keep}",
                parameter,
            )
        if keep > self.longest:
            raise InvalidParameter(
                f"{parameter} must be at most the model's context of {self.longest} tokens; got {shown(keep)}", parameter
            )
        return keep

    async def texts(
        self,
        texts: Sequence[str],
        cut: Cut,
        parameter: str,
        add_special_tokens: bool = True,
        before: str = "",
        role: Role | None = None,
    ) -> list[Prompt]:
        """Tokenize texts. before: the prompt that goes before each of them. role: of the texts in late interaction."""
        names = [entry(parameter, i, len(texts)) for i in range(len(texts))]
        for text, own in zip(texts, names, strict=True):
            if not text:
                raise InvalidParameter(f"{own} is empty: send a text", parameter)
        reader = None
        if role is not None and self.prompts.tokenizer is not None:
            reader = role_reader(self.prompts.tokenizer, model_pooling(self.server), role, self.longest)
            before = reader.text
            cut = Cut(self.longest, min(reader.room, cut.keep or reader.room), True, *self.special(add_special_tokens))
        if before:
            texts = [before + text for text in texts]
        if cut.keep is None:
            total = sum(map(len, texts))
            refuse_more(parameter, total, self.server.limits.prompt_characters, "characters in all inputs together")
            for text, own in zip(texts, names, strict=True):
                self._refuse_hopeless(text, parameter, own)
        if self.lower_case:
            texts = [text.lower() for text in texts]
        encoded: list[Prompt] = []
        for i in range(0, len(texts), AT_ONCE):
            jobs = [
                self._encode(text, add_special_tokens, cut, parameter, own)
                for text, own in zip(texts[i : i + AT_ONCE], names[i : i + AT_ONCE], strict=True)
            ]
            encoded += await asyncio.gather(*jobs)
        unpooled = unpooled_tokens(self.prompts.tokenizer, model_pooling(self.server), before)
        if unpooled:
            encoded = [replace(prompt, extras=replace(prompt.extras, unpooled=unpooled)) for prompt in encoded]
        return encoded if reader is None else [reader.complete(prompt) for prompt in encoded]

    def _refuse_hopeless(self, text: str, parameter: str, name: str) -> None:
        """Refuse what is too long whatever its tokens are."""
        try:
            self.prompts.refuse_hopeless(len(text), parameter)
        except PromptTooLong:
            raise self.too_long(parameter, name) from None

    async def _encode(self, text: str, add_special_tokens: bool, cut: Cut, parameter: str, name: str) -> Prompt:
        try:
            return self.finished(await self.prompts.encode(text, add_special_tokens, cut, parameter))
        except PromptTooLong:
            raise self.too_long(parameter, name) from None

    def too_long(self, parameter: str, name: str) -> PromptTooLong:
        return PromptTooLong(
            f"{name} is longer than the model's context of {self.longest} tokens. Shorten it, or {self.shorten}",
            parameter,
        )

    def ids(self, ids: list[int], cut: Cut, parameter: str, name: str) -> Prompt:
        """Check token ids, which have no special tokens but their own."""
        if not ids:
            raise InvalidParameter(f"{name} is empty: send at least one token id", parameter)
        if min(ids) < 0 or max(ids) >= self.prompts.vocab_size:
            bad = shown(next(i for i in ids if not 0 <= i < self.prompts.vocab_size))
            raise InvalidParameter(
                f"{name}: token id {bad} is out of vocabulary: ids go from 0 to {self.prompts.vocab_size - 1}", parameter
            )
        wanted = Cut(cut.most, cut.keep, cut.right).of(ids)[1]
        if wanted is None:
            raise self.too_long(parameter, name)
        return self.finished(Prompt(None, wanted))

    def finished(self, prompt: Prompt) -> Prompt:
        if not prompt.ids:
            raise InvalidParameter("an input has no tokens: the tokenizer leaves out all of its characters", "input")
        return replace(prompt, cache_salt=self.cache_salt, extras=self.extras)


def model_pooling(server: Server) -> ModelPooling:
    """Return how the model pools. Endpoints of models that do not pool are not routed here."""
    found = pooling_of(server.llm.config)
    assert found is not None
    return found


def entry(parameter: str, i: int, count: int) -> str:
    return parameter if count == 1 else f"{parameter}[{i}]"


def split_inputs(given: Any, parameter: str = "input") -> list[str | list[int]]:
    """Return the inputs of a request. A list of integers is one input."""
    if given is None:
        raise InvalidParameter(f"{parameter} is missing: send text, token ids, or a list of either", parameter)
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise InvalidParameter(f"{parameter} is empty: send at least one text", parameter)
    refuse_more(parameter, len(given), MAX_INPUTS, "inputs")
    return list(given)


async def read_inputs(server: Server, request: InputFields) -> list[Prompt]:
    """Read the prompts of a request with `input` or `messages`."""
    assert isinstance(request, PoolingFields)
    reader = await InputReader.of(server, request.model, request.cache_salt)
    if request.messages is not None:
        model_pooling(server).before(getattr(request, "prompt_name", None), text=False)
        return [await _read_messages(reader, request, request.messages)]
    for name in TemplateFields.model_fields:
        if name not in InputFields.__annotations__ and name in request.model_fields_set - {"model"}:
            raise InvalidParameter(f"{name} cannot be used with input: it belongs to messages. Leave it out", name)
    inputs = split_inputs(request.input)
    asked = getattr(request, "prompt_name", None)
    before, role = model_pooling(server).before(asked, isinstance(inputs[0], str)), find_role(model_pooling(server), asked)
    special = request.add_special_tokens is not False
    cut = reader.cut(request, reader.special(special))
    if isinstance(inputs[0], str):
        return await reader.texts([str(text) for text in inputs], cut, "input", special, before, role)
    ids = [one for one in inputs if not isinstance(one, str)]
    total = sum(map(len, ids))
    refuse_more("input", total, server.limits.prompt_tokens, "tokens in all inputs together")
    return [reader.ids(one, cut, "input", entry("input", i, len(ids))) for i, one in enumerate(ids)]


async def _read_messages(reader: InputReader, request: InputFields, messages: list[dict[str, Any]]) -> Prompt:
    assert isinstance(request, PoolingFields)
    if request.input is not None:
        raise InvalidParameter("input and messages were both sent: leave one out", "messages")
    if not messages:
        raise InvalidParameter("messages is empty: send at least one message", "messages")
    request = request.model_copy(update={"add_special_tokens": bool(request.add_special_tokens)})
    try:
        cut = reader.cut(request, (0, 0))
        return reader.finished(await render_messages(reader.server, request, messages, tools=request.tools, cut=cut))
    except PromptTooLong:
        raise reader.too_long("messages", "messages") from None


# ---- prompts → results


@dataclass(frozen=True)
class PoolingJob:
    """One HTTP request's work."""

    id: str  # of the answer, as the client sees it
    model: str
    prompts: list[Prompt]
    params: PoolingParams
    priority: int
    cache_tenant: str | None
    trace_headers: dict[str, str] | None
    rank: int | None
    parameter: str  # the field that errors of the engine name instead of "prompt"
    names: Sequence[str]  # of the prompts in errors
    created: int = field(default_factory=lambda: int(time.time()))


def make_job(
    server: Server,
    raw: Request,
    request: Any,
    prefix: str,
    model: str,
    prompts: list[Prompt],
    params: PoolingParams,
    parameter: str = "input",
    names: Sequence[str] = (),
) -> PoolingJob:
    """names: of the prompts in errors; default: entries of `parameter`."""
    traced = {name: raw.headers[name] for name in _TRACE_HEADERS if name in raw.headers}
    return PoolingJob(
        id=answer_id(prefix, raw, request),
        model=model,
        prompts=prompts,
        params=params,
        priority=priority_of(raw, request, server.llm.config.policy),
        cache_tenant=getattr(raw.state, "tenant", None),
        trace_headers=traced or None,
        rank=rank_of(raw, server.llm),
        parameter=parameter,
        names=names or [entry(parameter, i, len(prompts)) for i in range(len(prompts))],
    )


async def collect(server: Server, job: PoolingJob) -> list[Result]:
    """Return the result of every prompt, in order. Raise the first error, after all other prompts have ended."""
    results: dict[int, Result] = {}

    async def run(i: int) -> None:
        engine_id = f"{job.id}-{i}-{next(_serials):x}"
        stream = server.llm.encode(
            job.prompts[i],
            job.params,
            engine_id,
            priority=job.priority,
            cache_tenant=job.cache_tenant,
            trace_headers=job.trace_headers,
            data_parallel_rank=job.rank,
        )
        async with aclosing(stream):
            async for result in stream:
                results[i] = result
        error = results[i].error
        if error == NOT_FINITE:
            raise InvalidParameter(f"{job.names[i]}: {error}", job.names[i].partition("[")[0])
        if error is not None:
            raise GenerationFailed(error.splitlines()[0])

    try:
        async with asyncio.TaskGroup() as group:
            for i in range(len(job.prompts)):
                group.create_task(run(i))
                if i % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        raise _first(errors, job.parameter) from None
    return [results[i] for i in range(len(job.prompts))]


def _first(errors: BaseExceptionGroup[BaseException], parameter: str) -> BaseException:
    error = errors.exceptions[0]
    if isinstance(error, RequestError) and error.parameter == "prompt":
        return type(error)(str(error), parameter)
    return error


def list_answer(server: Server, job: PoolingJob, results: Sequence[Result], show: Callable[[int], Any], count: int) -> Response:
    """Return an answer with `count` entries."""
    return json_response(
        {
            "id": job.id,
            "object": "list",
            "created": job.created,
            "model": job.model,
            "data": many(show, results, count),
            "usage": usage_of(server, results),
        }
    )


def many(show: Callable[[int], Any], results: Sequence[Result], count: int) -> Any:
    """Return `count` entries of an answer. Those of a large answer are made while it is written, in turns with other work."""
    few = sum(result.outputs.data.size for result in results) <= FEW_VALUES
    return [show(i) for i in range(count)] if few else LazyList(map(show, range(count)))


def usage_of(server: Server, results: Sequence[Result]) -> PoolingUsage:
    tokens = sum(len(result.prompt_token_ids) for result in results)
    usage: PoolingUsage = {"prompt_tokens": tokens, "total_tokens": tokens}
    cached = server.reported_cached(sum(result.num_cached_tokens for result in results))
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
