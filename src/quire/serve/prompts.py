"""Text, token ids or messages → prompts of known length."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.serve.limits import check_work, refuse_more
from quire.serve.protocol.completions import CompletionRequest
from quire.serve.protocol.fields import GenerationFields, TemplateFields
from quire.serve.sampling import asked_tokens
from quire.serve.server import Server
from quire.text.messages import Messages
from quire.text.tool_prompt import instructions, tell_tools
from quire.types.errors import InvalidParameter, NotSupported, PromptTooLong, RequestError

_Render = Callable[..., Awaitable[tuple[str, list[int]]]]

TEXT_KEYS = ("text", "refusal", "thinking")
_OPTIONS = {
    "messages", "conversation", "self", "tokenize", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_content_format", "tools", "documents", "return_dict",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


@dataclass(frozen=True)
class Prompt:
    text: str | None  # as the client or the template wrote it; None: it came as token ids, or was cut
    ids: list[int]


async def read_prompts(server: Server, request: CompletionRequest) -> list[Prompt]:
    given = _split(request.prompt)
    check_work(len(given), request.n or 1, server.limits)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    refuse_more("prompt", sum(map(len, texts)), server.limits.prompt_characters, "characters in all prompts together")
    if request.truncate_prompt_tokens is None:
        for text in texts:
            refuse_hopeless(server, text)
    encoded = [server.llm.encode(text, request.add_special_tokens) for text in texts]
    ids = iter(await asyncio.gather(*encoded) if encoded else [])
    prompts = [Prompt(prompt, next(ids)) if isinstance(prompt, str) else Prompt(None, prompt) for prompt in given]
    total = sum(len(prompt.ids) for prompt in prompts)
    refuse_more("prompt", total, server.limits.prompt_tokens, "tokens in all prompts together")
    return [truncate(server, request, prompt) for prompt in prompts]


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
) -> Prompt:
    """The chat template's prompt of these messages. `variables` for it stand over the server's and under the request's."""
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
    _check_messages(server, messages)
    messages = [_completed(message) for message in messages]
    render: _Render = partial(
        server.llm.render_chat,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        chat_template=request.chat_template,
        chat_template_content_format=server.settings.chat_template_content_format,
        documents=documents,
        **variables,
    )
    described = server.formats.tell_tools and request.chat_template is None
    return Prompt(*(await _describing(render, messages, tools) if described else await render(messages, tools=tools)))


async def _describing(render: _Render, messages: Messages, tools: Sequence[dict[str, Any]] | None) -> tuple[str, list[int]]:
    """For templates that say nothing of tools. Those without a role for the system leave its words out, or raise: there the
    first question begins with them.
    """
    try:
        text, ids = await render(tell_tools(messages, tools, "system"))
        if not tools or instructions(tools) in text:
            return text, ids
    except RequestError:
        if not tools:
            raise
    return await render(tell_tools(messages, tools, "user"))


def _completed(message: dict[str, Any]) -> dict[str, Any]:
    """Clients and templates know what an assistant thought under two names; a message that has one gets both.

    One that calls tools or thinks need not say anything; templates join what it says to other text all the same.
    """
    if message.get("role") != "assistant":
        return message
    if message.get("content") is None:
        message = {**message, "content": ""}
    thought = message.get("reasoning", message.get("reasoning_content"))
    return message if thought is None else {**message, "reasoning": thought, "reasoning_content": thought}


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text: its content, or that of its parts line by line."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "")
    texts = [part if isinstance(part, str) else next((part[key] for key in TEXT_KEYS if key in part), "") for part in content]
    return "\n".join(map(str, texts))


def _check_messages(server: Server, messages: Sequence[dict[str, Any]]) -> None:
    """Parts that are not text would vanish, or reach a template that cannot show them."""
    parts = characters = 0
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            characters += len(content)
        if not isinstance(content, list):
            continue
        parts += len(content)
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind not in TEXT_PARTS:
                raise NotSupported(
                    f"messages[{i}].content: this model takes text only, not a part of type {kind!r:.80}", "messages"
                )
            characters += sum(len(value) for value in part.values() if isinstance(value, str)) if isinstance(part, dict) else 0
    refuse_more("messages", parts, server.limits.message_parts, "content parts together")
    refuse_more("messages", characters, server.limits.prompt_characters, "characters together")


def truncate(server: Server, request: GenerationFields, prompt: Prompt) -> Prompt:
    """The prompt, cut to truncate_prompt_tokens if that is asked for and it is longer."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    longest = server.llm.max_model_len
    if keep > longest:
        raise InvalidParameter(
            f"truncate_prompt_tokens={keep} is more than the model's context of {longest} tokens", "truncate_prompt_tokens"
        )
    if keep == -1:
        keep = max(1, longest - max(1, asked_tokens(request) or 0))
    if len(prompt.ids) <= keep:
        return prompt
    kept = prompt.ids[:keep] if request.truncation_side == "right" else prompt.ids[len(prompt.ids) - keep :]
    return Prompt(None, kept)


def refuse_hopeless(server: Server, text: str) -> None:
    """A text that is too long even if all its tokens were the vocabulary's longest need not be tokenized."""
    most = server.llm.max_model_len * server.longest_token
    if len(text) > most:
        raise PromptTooLong(
            f"This model's maximum context length is {server.llm.max_model_len} tokens. However, your prompt has {len(text)} "
            f"characters, which cannot be fewer than {-(-len(text) // server.longest_token)} tokens. Shorten the prompt.",
            "prompt",
        )
