"""Chat templates: a conversation becomes a prompt.

Templates are Jinja programs that come with the model (or the request), so they run in an immutable sandbox with bounded
ranges, products and output. Their dialect is Hugging Face's: trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now` and a `generation` block. Whatever goes wrong in a template is the request's error.
Knows nothing of tokens; media parts of a message are passed on untouched to templates that read parts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.text.messages import as_parts, flatten_parts, mark_final, parse_tool_arguments, validate, with_content
from quire.text.template_syntax import reads_parts, reads_tools
from quire.types.errors import ConfigError, InvalidParameter, RequestError

MOST_OUTPUT = 64 * 2**20  # characters
MOST_REPEATED = 2**20  # items a template may make with one `*`
MOST_BITS = 4096  # of a number made with `**`
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
    ) -> str:
        """`continue_final_message`: the prompt ends with the last message's content, so that the model goes on with it.

        `content_format`: what the template gets as a message's content, a string, or a list of parts ("openai"); auto: what
        it reads.
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
            messages = flatten_parts(messages)
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
                if size > MOST_OUTPUT:
                    raise RequestError(f"the chat template wrote more than {MOST_OUTPUT} characters", "messages")
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
        return 0  # who compiles it says what is wrong


def _cut(prompt: str, final: str, marker: str) -> str:
    end = prompt.rfind(marker)
    # a template may trim the content in front, and only there: behind it was the marker
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
                if isinstance(items, str | list | tuple) and isinstance(times, int) and len(items) * times > MOST_REPEATED:
                    raise OverflowError(f"{len(items)} items repeated {times} times are too many")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
            raise OverflowError("the power is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is only its body."""

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
