"""`--help` in sections: short by default, and more by name, as vLLM has it (`--help=all`, `--help=SECTION`, `--help=WORD`)."""

import argparse
from collections.abc import Iterable, Mapping

from quire.config.args import nearest

WIDTH = 78  # of a row of sections
MANY = 30  # flags from which a command's help is shortened
# flags of the engine that most people need, and those of who serves; a command's own are always shown
COMMON = frozenset({"model", "config", "dtype", "device", "max_model_len", "max_tokens", "temperature", "top_p"})
SERVING = COMMON | {
    "gpu_memory_utilization", "max_num_seqs", "served_model_name", "chat_template", "host", "port", "api_key",
    "tool_call_parser", "reasoning_parser",
}  # fmt: skip
LONG_SECTIONS = ("engine: ", "server: ", "sampling", "generated traffic")  # how titles of sections begin that are shortened
# the names of sections that users of vLLM know
KNOWN_AS = {
    "modelconfig": "engine: model", "loadconfig": "engine: model", "cacheconfig": "engine: cache and memory",
    "schedulerconfig": "engine: scheduler", "structuredoutputsconfig": "engine: lengths and sampling", "frontend": "server",
    "observabilityconfig": "server: what is seen of it",
}  # fmt: skip

Group = argparse._ArgumentGroup


def short_help(parser: argparse.ArgumentParser) -> str:
    """All of a command with few flags; of others, what most people need and the sections that there are."""
    shown = {group: _visible(group) for group in parser._action_groups}
    if sum(map(len, shown.values())) < MANY:
        return full_help(parser)
    common = SERVING if "--host" in parser._option_string_actions else COMMON
    kept = {group: [one for one in ones if _is_own(group) or one.dest in common] for group, ones in shown.items()}
    sections = _rows(f"{group.title} ({len(shown[group])})" for group in shown if group.title and kept[group] != shown[group])
    more = [
        "more options, by section:", *sections, "",
        f"{parser.prog} --help=all lists every option, --help=SECTION those of a section, --help=WORD those with a word",
    ]  # fmt: skip
    return _format(parser, kept) + "\n" + "\n".join(more) + "\n"


def _rows(items: Iterable[str]) -> list[str]:
    """As many in a row as fit, none of them broken."""
    rows: list[str] = []
    for item in items:
        if rows and len(rows[-1]) + len(item) + 2 <= WIDTH:
            rows[-1] += f", {item}"
        else:
            rows.append(f"  {item}")
    return rows


def full_help(parser: argparse.ArgumentParser) -> str:
    return _format(parser, {group: _visible(group) for group in parser._action_groups})


def help_about(parser: argparse.ArgumentParser, wanted: str) -> str | None:
    """Of everything, a section, a flag or a word; None where nothing is known of it."""
    word = wanted.strip().lower()
    groups = {group: _visible(group) for group in parser._action_groups if group.title}
    if word in ("all", "page"):
        return full_help(parser)
    if word == "listgroup":
        return "".join(f"{group.title} ({len(actions)})\n" for group, actions in groups.items() if actions)
    title = KNOWN_AS.get(word, word)
    found = {group: actions for group, actions in groups.items() if title in _names(group)}
    if not found:
        name = title.lstrip("-").replace("_", "-")
        exact = [action for action in parser._actions if f"--{name}" in action.option_strings]
        wanted_ones = exact or [action for action in parser._actions if _mentions(action, name)]
        found = {group: [action for action in actions if action in wanted_ones] for group, actions in groups.items()}
    return _format(parser, found, alone=True) if any(found.values()) else None


def unknown_topic(parser: argparse.ArgumentParser, wanted: str) -> str:
    names = [name for group in parser._action_groups for name in _names(group)]
    meant = nearest(wanted.lower(), names)
    return f"--help={wanted}: no section or option is called so{meant or '; --help=listgroup lists the sections'}"


def _visible(group: Group) -> list[argparse.Action]:
    return [action for action in group._group_actions if action.help is not argparse.SUPPRESS]


def _is_own(group: Group) -> bool:
    return not (group.title or "").startswith(LONG_SECTIONS)


def _names(group: Group) -> set[str]:
    """`engine: cache and memory` is also found as `engine` and as `cache and memory`."""
    title = (group.title or "").lower()
    before, _, after = title.partition(": ")
    return {title, before, after} - {""}


def _mentions(action: argparse.Action, word: str) -> bool:
    return any(word in text for text in (*action.option_strings, (action.help or "").lower()))


def _format(parser: argparse.ArgumentParser, groups: Mapping[Group, list[argparse.Action]], alone: bool = False) -> str:
    formatter = parser._get_formatter()
    if not alone:
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
    for group, actions in groups.items():
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(actions)
        formatter.end_section()
    if not alone:
        formatter.add_text(parser.epilog)
    return formatter.format_help()
