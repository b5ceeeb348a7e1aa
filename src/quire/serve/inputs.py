"""Request fields become prompts of known length and SamplingParams, with response_format and structured_outputs as grammars.

A field that is not set has the model's own default (generation_config.json).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request

from quire.features.media.host import modalities_of
from quire.features.media.inputs import MediaRef, options_of
from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.schema import Preparation, unenforced
from quire.serve.limits import check_work, refuse_more
from quire.serve.protocol import ChatRequest, CompletionRequest, GenerationFields, TemplateFields
from quire.serve.server import Server, server_of
from quire.serve.tools import ToolUse
from quire.text.prompts import PromptReader
from quire.text.workers.wire import Cut
from quire.types.errors import InvalidParameter, NotSupported, PromptTooLong
from quire.types.media import MODALITIES
from quire.types.prompts import Extras, Prompt
from quire.types.sampling import (
    GREEDY_BELOW,
    LOWEST_TEMPERATURE,
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from quire.types.structured import MAX_GRAMMAR_BYTES, StructuredOutputsParams, as_structured_outputs

UNENFORCED = b"x-quire-schema-unenforced"
SMALL = 1 << 14  # bytes of a schema that is checked on the event loop
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(request: GenerationFields) -> StructuredOutputsParams | None:
    """Return the constraint of the answer; None: there is none."""
    constraint = None if request.response_format is None else from_response_format(request.response_format)
    if request.structured_outputs is None:
        return constraint
    if constraint is not None:
        raise InvalidParameter(
            "response_format and structured_outputs both constrain the answer: leave one out", "response_format"
        )
    return as_structured_outputs(request.structured_outputs)


async def report_unenforced(raw: Request, constraint: StructuredOutputsParams | None, use: ToolUse | None = None) -> None:
    """List schema keywords that the grammar does not enforce in the answer's headers; in a strict tool they are an error."""
    if constraint is None or constraint.size > MAX_GRAMMAR_BYTES:
        return
    closed = server_of(raw).llm.config.args.structured_outputs_config.get("disable_additional_properties", True)
    if constraint.size <= SMALL:
        keywords = _look_over(constraint, use, closed)
    else:
        keywords = await asyncio.to_thread(_look_over, constraint, use, closed)
    if keywords:
        raw.state.response_headers = [(UNENFORCED, ", ".join(keywords).encode("ascii", "replace"))]


def _look_over(constraint: StructuredOutputsParams, use: ToolUse | None, closed: bool) -> list[str]:
    for i, (name, schema) in enumerate((use.schemas or {}).items() if use is not None and use.forced else ()):
        if use is not None and name in use.strict and use.name in (None, name):
            try:
                Preparation(schema, strict=True).make()
            except GrammarError as error:
                field = f"tools[{i}].function.parameters"
                raise InvalidParameter(f"{field}: {error}", field) from None
    return unenforced(constraint, closed)


def from_response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            wrapper = given.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
            if not isinstance(wrapper, dict) or not isinstance(schema, dict):
                raise InvalidParameter(
                    "response_format of type json_schema needs the schema, an object, at json_schema.schema: "
                    '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}',
                    "response_format",
                )
            return StructuredOutputsParams(json=schema, strict=wrapper.get("strict") is True)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=given)
        case other:
            raise InvalidParameter(
                f"response_format.type must be one of {', '.join(FORMATS)}; got {other!r}", "response_format"
            )


# what has the same name in both; the others are made of several fields, or of objects
SAME = tuple(
    name
    for name in GenerationFields.model_fields
    if name in SamplingParams.__struct_fields__
    and name not in ("prompt_logprobs", "repetition_detection", "structured_outputs")
)


def asked_tokens(request: GenerationFields) -> int | None:
    """Return the number of tokens that the client asked for; None: it set no limit."""
    if isinstance(request, ChatRequest):
        return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    assert isinstance(request, CompletionRequest)
    return request.max_tokens if "max_tokens" in request.model_fields_set else None


def only_echoes(request: GenerationFields) -> bool:
    """echo with max_tokens=0: the prompt and its logprobs are the answer; the one token the engine makes is not shown."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def max_tokens_for(request: GenerationFields, prompts: PromptReader, prompt: Prompt, defaults: Mapping[str, Any]) -> int:
    """Return the tokens that fit, at most as many as the request and the model's defaults allow."""
    asked = 1 if only_echoes(request) else asked_tokens(request)
    field = "prompt" if isinstance(request, CompletionRequest) else "messages"
    completion = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
    room = prompts.room(len(prompt.ids), asked, field, "max_completion_tokens" if completion else "max_tokens")
    if asked is None and isinstance(request, CompletionRequest):
        asked = request.max_tokens
    return min(value for value in (room, asked, defaults.get("max_tokens")) if value is not None)


def sampling_params(request: GenerationFields, max_tokens: int, defaults: Mapping[str, Any]) -> SamplingParams:
    if request.use_beam_search:
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
        )
    values = {name: value for name in SAME if (value := _value(request, name, defaults)) is not None}
    temperature = values.get("temperature", 1.0)
    if GREEDY_BELOW <= temperature < LOWEST_TEMPERATURE:
        values["temperature"] = LOWEST_TEMPERATURE  # smaller ones are not exact
    logprobs, prompt_logprobs = wanted_logprobs(request)
    detection = request.repetition_detection
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        repetition_detection=RepetitionDetectionParams(**detection.model_dump()) if detection else None,
        structured_outputs=structured_outputs(request),
        extra_args=request.vllm_xargs or None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _value(request: GenerationFields, name: str, defaults: Mapping[str, Any]) -> Any:
    value = getattr(request, name)
    return defaults.get(name) if value is None else value


def wanted_logprobs(request: GenerationFields) -> tuple[int | None, int | None]:
    """Return the number of logprobs for the output and for the prompt; None: none."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None, request.prompt_logprobs
    assert isinstance(request, CompletionRequest)
    prompt = request.prompt_logprobs
    return request.logprobs, request.logprobs if prompt is None and request.echo else prompt


def beam_params(request: GenerationFields, max_tokens: int) -> BeamSearchParams:
    """Return the parameters of a beam search, to which the model's sampling defaults do not apply."""
    temperature = request.temperature
    if temperature not in (None, 0.0, 1.0):
        raise InvalidParameter(f"beam search works at temperature 0 or 1, got {temperature}", "temperature")
    return BeamSearchParams(
        beam_width=1 if request.n is None else request.n,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        length_penalty=request.length_penalty,
        include_stop_str_in_output=request.include_stop_str_in_output,
    )


def check_request(request: GenerationFields) -> None:
    """Raise an error for fields that are not supported together."""
    if request.stream_options is not None and not request.stream:
        raise InvalidParameter("stream_options can only be given together with stream=true", "stream_options")
    if request.prompt_logprobs is not None:
        if request.prompt_logprobs < -1:
            raise InvalidParameter(f"prompt_logprobs must be at least -1, got {request.prompt_logprobs}", "prompt_logprobs")
        if request.stream and request.prompt_logprobs != 0:
            raise InvalidParameter("prompt_logprobs are not available with stream=true", "prompt_logprobs")
    if isinstance(request, ChatRequest):
        top = request.top_logprobs
        if top is not None and top < -1:
            raise InvalidParameter(f"top_logprobs must be at least -1, got {top}", "top_logprobs")
        if top and not request.logprobs:
            raise InvalidParameter("top_logprobs needs logprobs=true", "top_logprobs")
    if request.logprob_token_ids is not None and wanted_logprobs(request)[0] is None:
        raise InvalidParameter("logprob_token_ids needs logprobs", "logprob_token_ids")
    if request.length_penalty != 1.0 and not request.use_beam_search:
        raise InvalidParameter("length_penalty needs use_beam_search", "length_penalty")
    if request.use_beam_search and structured_outputs(request) is not None:
        raise InvalidParameter("a beam search cannot be constrained", "use_beam_search")
    if request.use_beam_search and request.stream:
        raise InvalidParameter("a beam search cannot be streamed", "stream")


# ---- prompts

AT_ONCE = 8  # texts tokenized together
TEXT_KEYS = ("text", "refusal", "thinking")
_OPTIONS = {
    "messages", "conversation", "self", "tokenize", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_content_format", "tools", "documents", "return_dict",
}  # fmt: skip
_TOGETHER = "tokens in all prompts together"
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


async def read_prompts(server: Server, request: CompletionRequest) -> list[Prompt]:
    given = _split(request.prompt)
    check_work(len(given), 1 if request.n is None else request.n, server.limits)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    refuse_more("prompt", sum(map(len, texts)), server.limits.prompt_characters, "characters in all prompts together")
    prompts, extras = await server.prompts(request.model)
    cut = _cut(server, request)
    if cut.keep is None:
        for text in texts:
            prompts.refuse_hopeless(len(text), "prompt")
    refuse_more("prompt", sum(map(len, given)) - sum(map(len, texts)), server.limits.prompt_tokens, _TOGETHER)
    encoded: list[Prompt] = []
    for i in range(0, len(texts), AT_ONCE):
        jobs = [prompts.encode(text, request.add_special_tokens, cut, "prompt") for text in texts[i : i + AT_ONCE]]
        encoded += [await jobs[0]] if len(jobs) == 1 else await asyncio.gather(*jobs)
    read = iter(encoded)
    tokenized = [next(read) if isinstance(prompt, str) else _cut_ids(cut, prompt) for prompt in given]
    refuse_more("prompt", sum(len(prompt.ids) for prompt in tokenized), server.limits.prompt_tokens, _TOGETHER)
    return [Prompt(prompt.text, prompt.ids, request.cache_salt, extras) for prompt in tokenized]


def _cut_ids(cut: Cut, ids: list[int]) -> Prompt:
    count, part = cut.of(ids)
    return Prompt(None, ids if part is None or count == len(part) else part)


def _split(prompt: Any) -> list[str | list[int]]:
    """One prompt or many? A list of integers is one prompt."""
    if prompt is None:
        raise InvalidParameter("prompt is missing: give text, token ids, or a list of either", "prompt")
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise InvalidParameter("prompt is empty: give at least one prompt", "prompt")
    return list(prompt)


async def render_messages(
    server: Server,
    request: TemplateFields,
    messages: Sequence[dict[str, Any]],
    documents: Sequence[dict[str, Any]] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    cut: Cut | None = None,
) -> Prompt:
    """Render messages with the chat template. `variables` override the server's; those of the request override both."""
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidParameter(
            "add_generation_prompt starts a new message and continue_final_message goes on with the last: set only one",
            "continue_final_message",
        )
    if request.chat_template is not None and not server.settings.trust_request_chat_template:
        raise InvalidParameter(
            "chat_template cannot be given in a request: this server was started without --trust-request-chat-template",
            "chat_template",
        )
    variables = {**server.settings.default_chat_template_kwargs, **(variables or {}), **(request.chat_template_kwargs or {})}
    for name in _OPTIONS & set(variables):
        raise InvalidParameter(
            f"chat_template_kwargs must not have {name!r}: it has its own place in a request", "chat_template_kwargs"
        )
    cut = cut or _cut(server, request)
    messages, refs = _take_media(server, request, messages)
    _check_messages(server, messages, may_be_cut=cut.keep is not None)
    prompts, extras = await server.prompts(request.model)
    prompt = await prompts.render(
        [_completed(message) for message in messages],
        describe_tools=server.formats.describe_tools and request.chat_template is None,
        tools=tools,
        cut=Cut(cut.most) if refs else cut,
        media=server.llm.media.marks,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        chat_template=request.chat_template,
        chat_template_content_format=server.settings.chat_template_content_format,
        documents=documents,
        variables=variables,
    )
    salt = request.cache_salt if isinstance(request, GenerationFields) else None
    if refs:
        prompt, extras = await _with_media(server, request, prompts, prompt, refs, extras)
        _check_length(prompts, prompt, cut)
    return replace(prompt, cache_salt=salt, extras=extras)


def _take_media(
    server: Server, request: TemplateFields, messages: Sequence[dict[str, Any]]
) -> tuple[Sequence[dict[str, Any]], list[MediaRef]]:
    """Return messages whose media parts have only their type, and the media. Raise an error for media that are refused."""
    media = server.llm.media
    for name in ("mm_processor_kwargs", "media_io_kwargs") if media.media is None else ():
        if getattr(request, name):
            raise NotSupported(f"{name} cannot be used: this model reads text only", name)
    taken, refs = media.take(messages)
    return cast(Sequence[dict[str, Any]], taken), refs


async def _with_media(
    server: Server, request: TemplateFields, prompts: PromptReader, prompt: Prompt, refs: Sequence[MediaRef], extras: Extras
) -> tuple[Prompt, Extras]:
    options = options_of(request.mm_processor_kwargs, request.media_io_kwargs)
    ids, items = await server.llm.media.complete(
        prompt.text, prompt.ids, refs, options, prompts.encode_text, request.add_special_tokens, "messages"
    )
    return replace(prompt, ids=ids), replace(extras, media=items)


def _check_length(prompts: PromptReader, prompt: Prompt, cut: Cut) -> None:
    """A prompt with media is not cut: it would lose a part of an item."""
    if cut.keep is not None and len(prompt.ids) > cut.keep:
        raise PromptTooLong(
            f"the prompt has {len(prompt.ids)} tokens, and one with images or videos cannot be cut to {cut.keep}. Shorten it",
            "messages",
        )
    prompts.room(len(prompt.ids), None, "messages")


def _completed(message: dict[str, Any]) -> dict[str, Any]:
    """Complete a message of the assistant for chat templates.

    Clients and templates have two names for reasoning; a message with one of them gets both. A message with tool calls or
    reasoning needs no content, but templates join it to other text, so it gets an empty one.
    """
    if message.get("role") != "assistant":
        return message
    if message.get("content") is None:
        message = {**message, "content": ""}
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    return message if reasoning is None else {**message, "reasoning": reasoning, "reasoning_content": reasoning}


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text: its content, or that of its parts line by line."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "")
    texts = [part if isinstance(part, str) else next((part[key] for key in TEXT_KEYS if key in part), "") for part in content]
    return "\n".join(map(str, texts))


def _check_messages(server: Server, messages: Sequence[dict[str, Any]], may_be_cut: bool) -> None:
    """Raise an error for parts that are not text, and for too much text."""
    parts = characters = 0
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            characters += len(content)
        if not isinstance(content, list):
            continue
        parts += len(content)
        for k, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind not in (*TEXT_PARTS, *MODALITIES):
                known = " or ".join(["text", *(f"{each}_url" for each in modalities_of(server.llm.config))])
                raise NotSupported(
                    f"messages[{i}].content[{k}]: parts of type {kind!r:.80} are not known. Send parts of type {known}",
                    "messages",
                )
            characters += sum(len(value) for value in part.values() if isinstance(value, str)) if isinstance(part, dict) else 0
    refuse_more("messages", parts, server.limits.message_parts, "content parts together")
    refuse_more("messages", characters, server.limits.prompt_characters, "characters together")
    if not may_be_cut:
        server.llm.prompts.refuse_hopeless(characters, "messages")


def _cut(server: Server, request: CompletionRequest | TemplateFields) -> Cut:
    if not isinstance(request, GenerationFields):
        return server.llm.prompts.cut(None)
    return server.llm.prompts.cut(request.truncate_prompt_tokens, request.truncation_side == "right", asked_tokens(request))
