"""How the served model writes tool calls and reasoning: chosen once, by the settings or by its chat template."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from quire.config.server_args import ServerArgs
from quire.text.parse.format import Format, Thinking
from quire.text.parse.registry import Use, detect, find_format, load_plugins
from quire.text.tokenizer import Tokenizer
from quire.text.tool_prompt import GENERIC, ignores_tools
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)

AUTO = "auto"
LONGEST_SUFFIX = 64  # characters


@dataclass(frozen=True)
class ModelFormats:
    """None: such things are not parsed. `specials` are the strings that detokenization leaves out."""

    tools: Format | None = None
    reasoning: Format | None = None
    specials: frozenset[str] = frozenset()
    begin_ids: tuple[int, ...] = ()  # of the mark that begins the reasoning
    end_id: int | None = None  # of the one that ends it; None: it is not a single token, or there is none
    opening: str = ""  # text that opens the reasoning; "": its mark
    forced_ids: tuple[int, ...] = ()  # end the reasoning when its budget is spent; none: end_id
    describe_tools: bool = False  # the template says nothing of tools: the prompt describes them

    @property
    def thinking(self) -> Thinking | None:
        return None if self.reasoning is None else self.reasoning.thinking


def check_parsers(settings: ServerArgs) -> None:
    """Raises ConfigError for a plugin that fails or an unknown name, before anything is loaded."""
    load_plugins(name for name in (settings.tool_parser_plugin, settings.reasoning_parser_plugin) if name)
    for name, use in _asked(settings):
        if name != AUTO:
            find_format(name, use)


def choose_formats(settings: ServerArgs, tokenizer: Tokenizer | None) -> ModelFormats:
    template = None if tokenizer is None else tokenizer.chat_template
    chosen: dict[Use, Format] = {}
    describe_tools = False
    for name, use in _asked(settings):
        found = detect(template, use) if name == AUTO else name
        if use == "tool calls" and found in (None, GENERIC):
            found = GENERIC
            describe_tools = ignores_tools(template)
        if found is None:
            logger.warning("the chat template shows no known way to write %s: nothing of it is parsed", use)
            continue
        how = "" if name != AUTO else " (the chat template shows no other)" if found == GENERIC else " (by the chat template)"
        note = "; tools are described in the prompt" if describe_tools and use == "tool calls" else ""
        logger.info("%s: parsed as %s%s%s", use, found, how, note)
        chosen[use] = find_format(found, use, _suffix(tokenizer))
    formats = ModelFormats(chosen.get("tool calls"), chosen.get("reasoning"), describe_tools=describe_tools)
    if tokenizer is None:
        return formats
    formats = replace(formats, specials=frozenset(tokenizer.all_special_tokens))
    if formats.thinking is None:
        return formats
    begin, end = (
        tokenizer.encode(marks[0], add_special_tokens=False) for marks in (formats.thinking.begin, formats.thinking.end)
    )
    formats = replace(formats, begin_ids=tuple(begin), end_id=end[0] if len(end) == 1 else None)
    return _with_own_texts(formats, settings.reasoning_config, tokenizer) if settings.reasoning_config else formats


def _with_own_texts(formats: ModelFormats, config: Mapping[str, object], tokenizer: Tokenizer) -> ModelFormats:
    """`reasoning_config`: the texts contain the parser's marks, so that the answer is still parsed."""
    assert formats.thinking is not None
    opening, closing = str(config.get("reasoning_start_str") or ""), str(config.get("reasoning_end_str") or "")
    if opening and not opening.rstrip().endswith(formats.thinking.begin):
        raise ConfigError(
            f"reasoning_config.reasoning_start_str must end with {' or '.join(formats.thinking.begin)}; got {opening!r}"
        )
    ids = tuple(tokenizer.encode(closing, add_special_tokens=False)) if closing else ()
    if closing and (not closing.rstrip().endswith(formats.thinking.end) or formats.end_id not in ids):
        raise ConfigError(
            f"reasoning_config.reasoning_end_str must end with {formats.thinking.end[0]}, a single token; got {closing!r}"
        )
    return replace(formats, opening=opening, forced_ids=ids)


def _suffix(tokenizer: Tokenizer | None) -> str:
    suffix = None if tokenizer is None else tokenizer.init_kwargs.get("token_suffix")
    return suffix if isinstance(suffix, str) and len(suffix) <= LONGEST_SUFFIX else ""


def _asked(settings: ServerArgs) -> list[tuple[str, Use]]:
    """Tool calls are always parsed: a request that has tools may be answered with calls, on any server."""
    wanted: list[tuple[str, Use]] = [
        (settings.tool_call_parser or AUTO, "tool calls"),
        (settings.reasoning_parser, "reasoning"),
    ]
    return [(name, use) for name, use in wanted if name]


@lru_cache(maxsize=256)
def special_marks(form: Format, specials: frozenset[str]) -> tuple[bool, frozenset[str]]:
    """Are some of the markers special tokens? And the other special tokens, which are left out of answers."""
    marks = form.marks
    used = frozenset(special for special in specials if special and any(special in mark for mark in marks))
    return bool(used), frozenset(special for special in specials - used if special)
