"""Chat templates: a conversation becomes a prompt.

Templates are Jinja programs that come with the model (or the request), so they run in an immutable sandbox with bounded
ranges, products and output. Their dialect is Hugging Face's: trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now` and a `generation` block. Any failure in a template is the request's error. Messages are prepared for it
without changing what the caller passed; media parts are passed on to templates that read parts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.types.errors import ConfigError, InvalidParameter, NotSupported, RequestError
from quire.types.json_text import read_json

MAX_OUTPUT = 64 * 2**20  # characters
MAX_REPEATED = 2**20  # items a template may make with one `*`
MAX_BITS = 4096  # of a number made with `**`
CACHED_TEMPLATES = 64
CONTENT_FORMATS = ("auto", "string", "openai")


def read_template(given: str) -> str:
    """A template as the user gave it: as text, or as the name of a file."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {given!r} is neither a template (it has no braces) nor a readable file: {error}"
        ) from error


def check_content_format(given: str) -> None:
    if given not in CONTENT_FORMATS:
        raise InvalidParameter(
            f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}; got {given!r}",
            "chat_template_content_format",
        )


class ChatTemplates:
    """The templates of one tokenizer by name; a single one is called "default"."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        self._templates = dict(templates)

    @property
    def source(self) -> str | dict[str, str] | None:
        if not self._templates:
            return None
        return self._templates["default"] if set(self._templates) == {"default"} else dict(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        media: "MediaMarks | None" = None,
    ) -> str:
        """`continue_final_message`: the prompt ends with the last message's content, so that the model goes on with it.

        `content_format`: what the template gets as a message's content, a string, or a list of parts ("openai"); auto: what
        it reads. `media`: how images and videos are written for templates that take strings.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt starts a new message, continue_final_message goes on with the last: set only one",
                "continue_final_message",
            )
        validate(messages)
        template = compile_template(self.choose(chat_template, bool(tools)))
        messages = parse_tool_arguments(messages)
        check_content_format(content_format)
        if content_format == "openai":
            messages = as_parts(messages)
        elif content_format == "string" or not template.reads_parts:
            messages = flatten_parts(messages, media)
        else:
            messages = plain_parts(messages)
        final, marker = "", ""
        if continue_final_message:
            messages, final, marker = mark_final(messages)
        prompt = template.render(
            {
                **(variables or {}),
                "messages": with_content(messages),
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut(prompt, final, marker) if continue_final_message else prompt

    def choose(self, asked: str | None, tools: bool) -> str:
        if asked is not None:
            return self._templates.get(asked, asked)
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise RequestError(
                f"there are several chat templates and no default: pass chat_template= one of {sorted(self._templates)}",
                "chat_template",
            )
        raise RequestError(
            "the model has no chat template (base models have none): give a plain prompt instead of messages, "
            "or a Jinja template, as chat_template= in Python or --chat-template FILE for a server",
            "chat_template",
        )


class Template:
    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.reads_parts, self.reads_tools = reads_parts(tree), reads_tools(tree)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is not valid Jinja (line {error.lineno}): {error.message}", "chat_template"
            ) from None
        except RecursionError:
            raise RequestError("the chat template nests too deep to be read", "chat_template") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        parts, size = [], 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_OUTPUT:
                    raise RequestError(f"the chat template wrote more than {MAX_OUTPUT} characters", "messages")
                parts.append(part)
        except (RequestError, MemoryError):
            raise
        except Exception as error:  # a template may fail in any way Python code may
            raise RequestError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}", "messages"
            ) from error
        return "".join(parts)


@lru_cache(maxsize=CACHED_TEMPLATES)
def compile_template(source: str) -> Template:
    return Template(source)


def count_lexemes(source: str, most: int) -> int:
    """What a template's compilation takes time by; more than `most` are not counted."""
    try:
        found = (kind for _, kind, _ in _environment().lex(source) if kind not in ("data", "whitespace"))
        return sum(1 for _ in islice(found, most + 1))
    except jinja2.TemplateSyntaxError:
        return 0  # its compilation reports the error


def _cut(prompt: str, final: str, marker: str) -> str:
    end = prompt.rfind(marker)
    # a template may trim the content in front, and only there: after it was the marker
    if end < 0 or not prompt[:end].endswith(final.lstrip()):
        raise RequestError(
            "continue_final_message needs a chat template that writes the last message's content as it is, "
            "and this one changes it or leaves it out",
            "continue_final_message",
        )
    return prompt[:end]


class _Sandbox(ImmutableSandboxedEnvironment):
    """Values that would not fit in memory cannot be made in one step."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int) and len(items) * times > MAX_REPEATED:
                    raise OverflowError(f"{len(items)} items repeated {times} times are too many")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
            raise OverflowError("the power is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML and sort the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise RequestError(str(message), "messages")


# ---- what a template reads, from its syntax tree


def reads_parts(template: nodes.Template) -> bool:
    """Does it read a message's content as a list of parts, rather than as a string?

    It does if it loops over a content and asks the items for their type or text.
    """
    names = {"content"}
    grew = True
    while grew:  # names that stand for a content, and names that stand for those
        assignments = [node for node in template.find_all(nodes.Assign) if _is_content(node.node, names)]
        assigned = {node.target.name for node in assignments if isinstance(node.target, nodes.Name)}
        grew = not assigned <= names
        names |= assigned
    return any(_is_content(loop.iter, names) and _asks_items(loop) for loop in template.find_all(nodes.For))


def reads_tools(template: nodes.Template) -> bool:
    return any(node.name == "tools" for node in template.find_all(nodes.Name))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or (node.expr2 is not None and _is_content(node.expr2, names))
        case nodes.Filter():
            return node.node is not None and _is_content(node.node, names)
        case nodes.Or():
            return _is_content(node.left, names)
    return False


def _asks_items(loop: nodes.For) -> bool:
    if isinstance(loop.iter, nodes.Filter):
        return loop.iter.name in ("selectattr", "rejectattr")
    item = loop.target.name if isinstance(loop.target, nodes.Name) else None
    return any(_key(node, item) in ("type", "text") for node in loop.find_all((nodes.Getattr, nodes.Getitem)))


def _key(node: nodes.Node, item: str | None) -> object:
    """What `item.key` or `item["key"]` asks for."""
    match node:
        case nodes.Getattr(node=nodes.Name(name=name), attr=key) if name == item:
            return key
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=key)) if name == item:
            return key
    return None


# ---- messages

Messages = Sequence[Mapping[str, Any]]

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MARKER = "\ue000the model goes on here\ue001"  # private-use characters: no real content has this


def validate(messages: Any) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameter(
            f"messages must be a list of {{'role': ..., 'content': ...}} dicts, got {type(messages).__name__}", "messages"
        )
    if not messages:
        raise InvalidParameter("messages must not be empty", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidParameter(
                f"messages[{i}] must be a dict with 'role' and 'content', got {type(message).__name__}", f"messages[{i}]"
            )
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidParameter(
                f"messages[{i}] needs a 'role' such as 'user', got {message.get('role')!r}", f"messages[{i}].role"
            )
        _validate_content(i, message.get("content"))


def _validate_content(i: int, content: Any) -> None:
    where = f"messages[{i}].content"
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidParameter(f"{where} must be a string or a list of parts, got {type(content).__name__}", where)
    for k, part in enumerate(content):
        if not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("type"), str)):
            raise InvalidParameter(
                f"{where}[{k}] must be a string or a part such as {{'type': 'text', 'text': ...}}, got {part!r:.100}", where
            )


class MediaMarks(msgspec.Struct, array_like=True, frozen=True):
    """How templates that expect strings get images and videos."""

    placeholders: dict[str, str]  # type of a part -> its text
    interleave: bool  # they stay between the texts; else they come first


def flatten_parts(messages: Messages, media: MediaMarks | None = None) -> list[dict[str, Any]]:
    """For templates that expect strings: the parts of a message become lines of one string."""
    marks = {} if media is None else media.placeholders
    out = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            lines = [(part, _line_of(part, marks, f"messages[{i}].content")) for part in content]
            if media is not None and not media.interleave:
                lines.sort(key=lambda line: isinstance(line[0], str) or line[0]["type"] not in marks)
            text = "\n".join(line for _, line in lines)
            message = {**message, "content": text}
        out.append(dict(message))
    return out


def _line_of(part: str | Mapping[str, Any], marks: Mapping[str, str], where: str) -> str:
    mark = None if isinstance(part, str) else marks.get(part["type"])
    return _text_of(part, where) if mark is None else mark


def as_parts(messages: Messages) -> list[dict[str, Any]]:
    """For templates that expect parts: every content is a list of them, and all text is of type text."""
    out = []
    for i, message in enumerate(messages):
        content = message.get("content")
        parts = [content] if isinstance(content, str) else content or []
        out.append({**message, "content": [_text_part(part, f"messages[{i}].content") for part in parts]})
    return out


def plain_parts(messages: Messages) -> list[dict[str, Any]]:
    """For templates that read strings and parts: the text of parts is of type text, except thinking, which some know."""
    out = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            parts = [
                dict(part)
                if not isinstance(part, str) and part["type"] == "thinking"
                else _text_part(part, f"messages[{i}].content")
                for part in content
            ]
            message = {**message, "content": parts}
        out.append(dict(message))
    return out


def _text_part(part: str | Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(part, str) and part["type"] not in _TEXT_KEYS:
        return dict(part)
    return {"type": "text", "text": _text_of(part, where)}


def _text_of(part: str | Mapping[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    key = _TEXT_KEYS.get(part["type"])
    if key is None:
        raise NotSupported(f"{where}: this model's chat template takes text only, not a part of type {part['type']!r}", where)
    if not isinstance(part.get(key), str):
        raise InvalidParameter(f"{where}: a part of type {part['type']!r} needs a string {key!r}, got {part.get(key)!r}", where)
    return str(part[key])


def parse_tool_arguments(messages: Messages) -> list[dict[str, Any]]:
    """OpenAI clients send the arguments of a call as a JSON string; templates expect the object."""
    out = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and isinstance(calls, Sequence) and not isinstance(calls, str):
            message = {
                **message,
                "tool_calls": [_parsed_call(call, f"messages[{i}].tool_calls[{k}]") for k, call in enumerate(calls)],
            }
        out.append(dict(message))
    return out


def _parsed_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = read_json(function["arguments"] or "{}")
    except ValueError as error:  # not JSON, a number too long, or too deep
        raise InvalidParameter(
            f"{where}.function.arguments is not valid JSON, or none that can be read: {error}", where
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def with_content(messages: Messages) -> list[dict[str, Any]]:
    """Add an empty content to messages without content and calls; most templates require one."""
    return [dict(m) if m.get("tool_calls") or m.get("content") is not None else {**m, "content": ""} for m in messages]


def mark_final(messages: Messages) -> tuple[list[dict[str, Any]], str, str]:
    """Return the messages with a marker after the last one's content, that content, and the marker."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*map(dict, before), {**last, "content": content + _MARKER}], content, _MARKER
    if content:
        *parts, final = content
        if isinstance(final, str):
            return [*map(dict, before), {**last, "content": [*parts, final + _MARKER]}], final, _MARKER
        key = _TEXT_KEYS.get(final["type"])
        if key is not None and isinstance(final.get(key), str):
            marked = {**final, key: final[key] + _MARKER}
            return [*map(dict, before), {**last, "content": [*parts, marked]}], str(final[key]), _MARKER
    raise InvalidParameter("continue_final_message needs a last message whose content is text", "continue_final_message")
