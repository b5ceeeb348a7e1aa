"""One turn of a conversation in any protocol: messages become a prompt, the answer becomes events.

Every protocol translates its request to a `ChatRequest`; the rest is the same for all.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from quire.serve.beam import search_beams
from quire.serve.errors import FieldNames, Terms, field_names_of
from quire.serve.events import AnswerReader, Reading
from quire.serve.generation import GenerationJob, collect, log_delta, make_job, raise_failure, run
from quire.serve.inputs import check_request, from_response_format, render_messages, report_unenforced
from quire.serve.limits import check_work
from quire.serve.protocol import ChatRequest
from quire.serve.server import Server
from quire.serve.tools import ModelFormats, ToolUse, read_tool_use, special_marks
from quire.text.pacing import Pace
from quire.text.parse.events import Event
from quire.text.parse.format import Format, combine
from quire.text.parse.formats import REQUIRED, named
from quire.text.tokenizer import Tokenizer
from quire.types.errors import InvalidParameter, RequestError
from quire.types.outputs import CompletionOutput, RequestOutput
from quire.types.prompts import Prompt
from quire.types.sampling import RequestOutputKind
from quire.types.structured import StructuredOutputsParams

LAST_TOKENS = 32  # of a prompt: enough to see how it ends

TurnDeltas = AsyncGenerator["TurnDelta", None]


@dataclass(frozen=True)
class Turn:
    job: GenerationJob
    reading: Reading


@dataclass(frozen=True)
class ChoiceDelta:
    """A delta of one choice."""

    part: CompletionOutput
    events: list[Event]
    finish_reason: str | None
    reasoning_tokens: int | None  # known when the reasoning has ended


@dataclass(frozen=True)
class TurnDelta:
    output: RequestOutput
    choices: list[ChoiceDelta]


@dataclass(frozen=True)
class Rendered:
    """A request that was checked, and its prompt."""

    model: str
    use: ToolUse
    prompt: Prompt
    inside: bool | None  # does the answer begin in the reasoning? None: the format says
    budget: int | None  # tokens for the reasoning
    field_names: FieldNames  # of errors


async def render_turn(server: Server, request: ChatRequest, terms: Terms = ()) -> Rendered:
    """Check the request and render its prompt; raise every error that can be found without an engine."""
    try:
        return await _render(server, request, terms)
    except RequestError as error:
        raise FieldNames(terms=terms).of(error) from error


async def _render(server: Server, request: ChatRequest, terms: Terms) -> Rendered:
    model = await server.check(request)
    check_request(request)
    use = read_tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
    _check_tools(request, use)
    check_work(1, 1 if request.n is None else request.n, server.limits)
    shown = request.tools
    described = server.formats.describe_tools and request.chat_template is None
    if use.mode == "none" and (described or server.settings.exclude_tools_when_tool_choice_none):
        shown = None  # a model that must not call tools is not given their description
    prompt = await render_messages(server, request, request.messages, request.documents, shown, _effort(request))
    budget = _budget(server, request)
    inside = _thinks_already(server, prompt, request.continue_final_message)
    if use.forced or _constrains(request) or budget is not None:
        prompt, inside = _settled(server, prompt, inside, budget is not None)
    return Rendered(model, use, prompt, inside, budget, field_names_of(request, use, terms))


async def prepare_turn(
    server: Server, raw: Request, request: ChatRequest, prefix: str, call_prefix: str = "chatcmpl-tool-", terms: Terms = ()
) -> Turn:
    """Prepare a turn. The prefixes are for the ids of the answer and of calls; `terms` are the protocol's names of fields."""
    rendered = await render_turn(server, request, terms)
    if rendered.use.forced:
        request = request.model_copy(update={"response_format": None})  # of the text, and there will be none
    try:
        job = make_job(server, raw, request, prefix, rendered.model, [rendered.prompt])
        reading = _reading(server.formats, request, rendered.use, rendered.inside)
        _set_up(server, job, rendered, reading)
        await report_unenforced(raw, job.params[0].structured_outputs, rendered.use)
    except RequestError as error:
        raise rendered.field_names.of(error) from error
    return Turn(
        replace(job, field_names=rendered.field_names), replace(reading, id_prefix=call_prefix, on_call=server.count_call)
    )


async def stream_turn(server: Server, turn: Turn) -> TurnDeltas:
    """Yield the deltas of the answers. Closing the generator aborts the request in the engine."""
    readers: dict[int, AnswerReader] = {}
    pace = Pace()
    async with aclosing(run(server, turn.job)) as outputs:
        async for _, output in outputs:
            raise_failure(output)
            log_delta(server, turn.job, output)
            pace.begin()
            yield await _delta(turn, output, readers, pace)
            for part in output.outputs:
                if readers[part.index].ended and part.finish_reason is None:
                    server.llm.stop_choice(output.request_id, part.index)


async def run_turn(server: Server, turn: Turn, request: ChatRequest) -> TurnDelta:
    """Return the whole answers."""
    if turn.reading.ends_early and not request.use_beam_search:
        return await _gather(server, turn)
    gather = search_beams(server, turn.job, request) if request.use_beam_search else collect(server, turn.job)
    [output] = await gather
    choices, pace = [], Pace()
    for part in output.outputs:
        await pace()
        choices.append(await _read_choice(part, turn.reading.reader(), pace))
    return TurnDelta(output, choices)


async def _gather(server: Server, turn: Turn) -> TurnDelta:
    """Return the whole answers, read delta by delta so that the engine can be stopped when an answer is complete."""
    deltas: dict[int, list[ChoiceDelta]] = {}
    async with aclosing(stream_turn(server, turn)) as steps:
        async for step in steps:
            output = step.output
            for choice in step.choices:
                deltas.setdefault(choice.part.index, []).append(choice)
    choices = [_joined(deltas[index]) for index in sorted(deltas)]
    return TurnDelta(replace(output, outputs=[choice.part for choice in choices]), choices)


def _joined(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    """Join the deltas of one choice."""
    parts = [delta.part for delta in deltas]
    whole = replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=None if parts[-1].logprobs is None else [each for part in parts for each in part.logprobs or ()],
    )
    return replace(deltas[-1], part=whole, events=[event for delta in deltas for event in delta.events])


async def _delta(turn: Turn, output: RequestOutput, readers: dict[int, AnswerReader], pace: Pace) -> TurnDelta:
    choices = []
    for part in output.outputs:
        reader = readers.get(part.index) or readers.setdefault(part.index, turn.reading.reader())
        choices.append(await _read_choice(part, reader, pace))
    return TurnDelta(output, choices)


async def _read_choice(part: CompletionOutput, reader: AnswerReader, pace: Pace) -> ChoiceDelta:
    events = await reader.read(part, pace)
    return ChoiceDelta(part, events, reader.finish_reason(part), reader.reasoning_tokens)


async def reasoning_tokens(server: Server, reasoning: str, known: int | None) -> int:
    """Return the number of reasoning tokens: up to the token that ended the reasoning, else those of its text."""
    if known is not None:
        return known
    return 0 if not reasoning else len(await server.llm.tokenize(reasoning, add_special_tokens=False))


# ---- how the answer will be read


def _reading(formats: ModelFormats, request: ChatRequest, use: ToolUse, inside: bool | None) -> Reading:
    tools = formats.tools
    form = combine(tools if use.mode == "auto" or (tools is not None and tools.channels) else None, formats.reasoning)
    if use.forced:
        calls = REQUIRED if use.name is None else named(use.name)
        thinking = None if form.thinking is None else replace(form.thinking, as_text=False)
        form = Format((calls,), thinking, short_ids=tools is not None and tools.short_ids)
    if not form.calls and form.thinking is None and form.channels is None:
        return Reading()
    _, noise = special_marks(form, formats.specials)
    return Reading(
        form,
        tools=use.schemas if use.mode != "none" else None,
        inside=inside,
        noise=noise if request.skip_special_tokens else frozenset(),
        parallel=use.parallel,
        with_reasoning=request.include_reasoning,
        calls_finish=use.mode != "named",
        only_calls=use.forced,
        one_of_a_kind=use.mode == "required",
        begin_ids=formats.begin_ids,
        end_id=formats.end_id,
    )


def _set_up(server: Server, job: GenerationJob, rendered: Rendered, reading: Reading) -> None:
    """Set the sampling parameters that reading the answer requires."""
    params, form, use = job.params[0], reading.form, rendered.use
    if form is not None and special_marks(form, server.formats.specials)[0]:
        params.skip_special_tokens = False  # the markers must be seen; the reading takes the rest out
    if reading.ends_early:
        params.output_kind = RequestOutputKind.DELTA
    if use.forced:
        # without this, small models invent arguments that no parameter names
        params.structured_outputs = StructuredOutputsParams(
            json=use.answer_schema(), disable_any_whitespace=True, disable_additional_properties=True
        )
    end_id = server.formats.end_id if rendered.inside else None
    if params.structured_outputs is not None:
        if end_id is not None:
            params.structured_outputs.starts_after = [end_id]
        elif form is not None and form.channels is not None:
            params.structured_outputs.starts_after = _ids(server.llm.get_tokenizer(), form.channels.final)
    if rendered.budget is not None and end_id is not None:
        params.thinking_token_budget, params.thinking_end_ids = rendered.budget, [end_id]
        params.thinking_forced_ids = list(server.formats.forced_ids) or None


def _check_tools(request: ChatRequest, use: ToolUse) -> None:
    if not use.forced:
        return
    if request.structured_outputs is not None:
        raise InvalidParameter(
            "structured_outputs is for the whole answer, and so is a tool that must be called: leave it out, or let the model "
            "decide about the tool (tool_choice auto)",
            "structured_outputs",
        )
    if request.response_format is not None:
        from_response_format(request.response_format)  # it is not used with a forced tool, but must be valid
    if request.use_beam_search:
        raise InvalidParameter(
            "a beam search cannot be made to call tools: leave use_beam_search out, or let the model decide (tool_choice auto)",
            "tool_choice",
        )


def _constrains(request: ChatRequest) -> bool:
    form = request.response_format
    return request.structured_outputs is not None or (form is not None and form.get("type") != "text")


# ---- where the reasoning begins


def _effort(request: ChatRequest) -> dict[str, Any]:
    """Templates know the effort by name; those that can only turn the reasoning off do so by one of two others."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False, "thinking": False} if effort == "none" else {})


def _budget(server: Server, request: ChatRequest) -> int | None:
    """Return the number of reasoning tokens after which the end of the reasoning is forced."""
    budget = request.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if server.formats.end_id is None:
        raise InvalidParameter(
            "thinking_token_budget needs --reasoning-parser, and a model whose reasoning ends with a single token",
            "thinking_token_budget",
        )
    return budget


def _thinks_already(server: Server, prompt: Prompt, continuing: bool) -> bool | None:
    """Does the prompt end in the reasoning (True), after it (False), or is that unknown (None)?"""
    thinking = server.formats.thinking
    if thinking is None:
        return None
    text = prompt.text
    if text is None:  # it was cut; its end is still there
        text = server.llm.get_tokenizer().decode(prompt.ids[-LAST_TOKENS:], skip_special_tokens=False)
    end = text.rstrip()
    if end.endswith(thinking.begin):
        return True
    if end.endswith(thinking.end):
        return False
    if continuing:
        opened = max(text.rfind(mark) for mark in thinking.begin)
        closed = max(text.rfind(mark) for mark in thinking.end)
        return opened > closed
    return None


def _settled(server: Server, prompt: Prompt, inside: bool | None, required: bool) -> tuple[Prompt, bool | None]:
    """A grammar waits for the end of the reasoning, and a budget forces it: it must be certain whether there is reasoning.

    A model that always begins with reasoning is made to begin; one that sometimes does, only if reasoning is `required`. An end
    that is no single token could be missed: then the grammar holds from the first token on, without reasoning.
    """
    thinking = server.formats.thinking
    if thinking is None:
        return prompt, None
    if inside is False or server.formats.end_id is None:
        return prompt, False
    if inside is None and not thinking.opened:
        if thinking.reopen and not required:
            return prompt, False
        text = server.formats.opening or thinking.begin[0] + "\n"
        ids = _ids(server.llm.get_tokenizer(), text)
        prompt = replace(prompt, text=None if prompt.text is None else prompt.text + text, ids=prompt.ids + ids)
    return prompt, True


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
