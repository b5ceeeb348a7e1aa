"""Text, token ids or messages → prompts of known length."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.serve.limits import check_work, refuse_more
from quire.serve.protocol import CompletionRequest, GenerationFields, TemplateFields
from quire.serve.sampling import asked_tokens
from quire.serve.server import Server
from quire.text.workers.wire import Cut
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.prompts import Prompt

AT_ONCE = 8  # texts that are tokenized together
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
        encoded += await asyncio.gather(*jobs)
    read = iter(encoded)
    tokenized = [next(read) if isinstance(prompt, str) else _cut_ids(cut, prompt) for prompt in given]
    refuse_more("prompt", sum(len(prompt.ids) for prompt in tokenized), server.limits.prompt_tokens, _TOGETHER)
    return [replace(prompt, cache_salt=request.cache_salt, extras=extras) for prompt in tokenized]


def _cut_ids(cut: Cut, ids: list[int]) -> Prompt:
    count, kept = cut.of(ids)
    return Prompt(None, ids if kept is None or count == len(kept) else kept)


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
    cut = cut or _cut(server, request)
    _check_messages(server, messages, may_be_cut=cut.keep is not None)
    prompts, extras = await server.prompts(request.model)
    prompt = await prompts.render(
        [_completed(message) for message in messages],
        describe_tools=server.formats.describe_tools and request.chat_template is None,
        tools=tools,
        cut=cut,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        chat_template=request.chat_template,
        chat_template_content_format=server.settings.chat_template_content_format,
        documents=documents,
        variables=variables,
    )
    salt = request.cache_salt if isinstance(request, GenerationFields) else None
    return replace(prompt, cache_salt=salt, extras=extras)


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


def _check_messages(server: Server, messages: Sequence[dict[str, Any]], may_be_cut: bool) -> None:
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
    if not may_be_cut:
        server.llm.prompts.refuse_hopeless(characters, "messages")


def _cut(server: Server, request: CompletionRequest | TemplateFields) -> Cut:
    if not isinstance(request, GenerationFields):
        return server.llm.prompts.cut(None)
    return server.llm.prompts.cut(request.truncate_prompt_tokens, request.truncation_side == "right", asked_tokens(request))
