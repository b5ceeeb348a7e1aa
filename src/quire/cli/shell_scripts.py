"""Completion scripts for bash, zsh and fish, made from an argparse parser with subcommands."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.files.wheel import ALIASES

MAX_HELP_CHARS = 72
NUMBERS = (int, float)
NUMBER_METAVARS = ("N", "X")  # of integers and reals in `config/fields.py`
MODEL_NAMES = ("model_tag", "words", "model")  # positional arguments that name a model, or may


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    help: str
    value: str  # the name of its value; empty: it has none
    choices: tuple[str, ...]
    files: bool  # a value may be the name of a file
    many: bool  # it may be given several times, or has several values


@dataclass(frozen=True)
class Command:
    """A command and its path, such as `bench latency`; the empty path is `quire` itself."""

    path: str
    help: str
    flags: tuple[Flag, ...]
    values: tuple[str, ...]  # of its positional arguments
    files: bool  # a positional argument may be the name of a file
    commands: Mapping[str, str]  # name: help


def read_tree(parser: argparse.ArgumentParser) -> list[Command]:
    """Return all commands of a parser, itself first. Hidden flags are left out."""
    return list(_walk(parser, "", ""))


def _walk(parser: argparse.ArgumentParser, path: str, text: str) -> Iterator[Command]:
    flags: list[Flag] = []
    values: list[str] = []
    files = False
    children: dict[str, argparse.ArgumentParser] = {}
    helps: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children |= action.choices
            helps |= {choice.dest: _brief(choice.help) for choice in action._choices_actions}
        elif action.option_strings:
            if action.help is not argparse.SUPPRESS:
                flags += _flags(action)
        elif action.choices is not None:
            values += map(str, action.choices)
        elif action.dest in MODEL_NAMES:
            values += ALIASES
            files = True
        else:
            files = True
    yield Command(path, text, tuple(flags), tuple(values), files, {name: helps.get(name, "") for name in children})
    for name, child in children.items():
        yield from _walk(child, f"{path} {name}".strip(), helps.get(name, ""))


def _flags(action: argparse.Action) -> list[Flag]:
    """Return one flag, or two for a switch with `--no-`."""
    text = _brief(action.help)
    if action.nargs == 0:
        on = tuple(name for name in action.option_strings if not name.startswith("--no-"))
        off = tuple(name for name in action.option_strings if name.startswith("--no-"))
        return [Flag(names, text, "", (), False, False) for names in (on, off) if names]
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    choices = tuple(map(str, action.choices or ()))
    if not choices and metavar.startswith("{") and metavar.endswith("}"):
        choices = tuple(metavar[1:-1].split(","))
    files = not choices and action.type not in NUMBERS and metavar not in NUMBER_METAVARS
    many = isinstance(action, argparse._AppendAction | argparse._ExtendAction) or action.nargs in ("+", "*")
    name = "value" if choices else metavar.lower()
    return [Flag(tuple(action.option_strings), text, name, choices, files, many)]


def _brief(text: str | None) -> str:
    """Return the first clause of a help text, without its default."""
    plain = " ".join((text or "").replace("%%", "%").split())
    clause = re.split(r"; |\. | \(default|: ", plain, maxsplit=1)[0].rstrip(".")
    if len(clause) <= MAX_HELP_CHARS:
        return clause
    return clause[: MAX_HELP_CHARS - 3].rpartition(" ")[0] + "..."


def _cases(tree: Sequence[Command]) -> list[str]:
    """Return `path/name` of every command: what follows the words so far, and the next word."""
    return [f"{command.path}/{name}" for command in tree for name in command.commands]


# bash

_BASH = """\
# bash completion of quire, made by `quire completion bash`
_quire() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} at= word words= flags= files=
    COMPREPLY=()
    # bash splits --flag=value into three words
    if [[ $cur == "=" ]]; then
        cur=
    elif [[ $prev == "=" ]]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $at/$word in
            %(commands)s) at="${at:+$at }$word" ;;
        esac
    done
    case $at:$prev in
%(values)s
    esac
    case $at in
%(words)s
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ -n $files ]]; then
        while IFS= read -r word; do
            COMPREPLY+=("$word")
        done < <(compgen -f -- "$cur")
    else
        _quire_no_files
    fi
}
_quire_no_files() {
    compopt +o default +o bashdefault 2>/dev/null
}
complete -o filenames -o bashdefault -o default -F _quire quire
"""


def bash(tree: Sequence[Command]) -> str:
    by_choices: dict[tuple[str, ...] | None, list[str]] = {}  # None: a value that is not the name of a file
    for command in tree:
        for flag in command.flags:
            if flag.value:
                patterns = [shlex.quote(f"{command.path}:{name}") for name in flag.names]
                by_choices.setdefault(flag.choices or (() if flag.files else None), []).extend(patterns)
    values = []
    for choices, patterns in by_choices.items():
        if choices is None:
            action = "_quire_no_files; return"
        elif not choices:
            action = "return"  # names of files, which is the default
        else:
            action = f'_quire_no_files; COMPREPLY=($(compgen -W {shlex.quote(" ".join(choices))} -- "$cur")); return'
        values.append(f"        {'|'.join(patterns)}) {action} ;;")
    words = []
    for command in tree:
        flags = " ".join(name for flag in command.flags for name in flag.names)
        rest = " ".join([*command.commands, *command.values])
        words.append(
            f"        {shlex.quote(command.path)}) words={shlex.quote(rest)} files={'1' if command.files else ''}\n"
            f"            flags={shlex.quote(flags)} ;;"
        )
    commands = "|".join(map(shlex.quote, _cases(tree)))
    return _BASH % {"commands": commands, "values": "\n".join(values), "words": "\n".join(words)}


# zsh

_ZSH = """\
#compdef quire
# zsh completion of quire, made by `quire completion zsh`

%(functions)s
if [[ ${funcstack[1]} == _quire ]]; then
    _quire "$@"
else
    compdef _quire quire
fi
"""
_ZSH_GROUP = """\
%(name)s() {
    local state line context curcontext=$curcontext
    typeset -A opt_args
    _arguments -C \\
%(flags)s
        '1:command:->command' \\
        '*::argument:->arguments'
    case $state in
        command)
            local -a commands=(
%(commands)s
            )
            _describe -t commands command commands ;;
        arguments)
            case $line[1] in
%(calls)s
            esac ;;
    esac
}
"""


def zsh(tree: Sequence[Command]) -> str:
    functions = [_zsh_group(command) if command.commands else _zsh_command(command) for command in tree]
    return _ZSH % {"functions": "\n".join(functions)}


def _zsh_name(path: str) -> str:
    return "_".join(["_quire", *re.sub(r"\W", "_", path).split()])


def _zsh_group(command: Command) -> str:
    rows = [_zsh_quote(f"{name}:{text}") for name, text in command.commands.items()]
    calls = [f"{name}) {_zsh_name(f'{command.path} {name}'.strip())} ;;" for name in command.commands]
    return _ZSH_GROUP % {
        "name": _zsh_name(command.path),
        "flags": "\n".join(f"        {_zsh_flag(flag)} \\" for flag in command.flags),
        "commands": "\n".join(f"                {row}" for row in rows),
        "calls": "\n".join(f"                {call}" for call in calls),
    }


def _zsh_command(command: Command) -> str:
    specs = [_zsh_flag(flag) for flag in command.flags]
    if command.values or command.files:
        actions = [f"compadd -- {' '.join(command.values)}"] if command.values else []
        actions += ["_files"] if command.files else []
        specs.append(_zsh_quote(f"*:argument:{{{'; '.join(actions)}}}"))
    body = " \\\n".join(f"        {spec}" for spec in specs)
    return f"{_zsh_name(command.path)}() {{\n    _arguments \\\n{body}\n}}\n"


def _zsh_flag(flag: Flag) -> str:
    """Return the specification of a flag for `_arguments`."""
    text = re.sub(r"([\[\]:\\])", r"\\\1", flag.help)
    value = ""
    if flag.value:
        action = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.files else " "
        name = re.sub(r"([:\\])", r"\\\1", flag.value)
        value = f":{name}:{action}"
    once = "*" if flag.many else "" if len(flag.names) == 1 else f"({' '.join(flag.names)})"
    equals = [f"{name}=" if flag.value and name.startswith("--") else name for name in flag.names]
    return " ".join(_zsh_quote(f"{once}{name}[{text}]{value}") for name in equals)


def _zsh_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# fish

_FISH = """\
# fish completion of quire, made by `quire completion fish`
function __quire_at
    set -l at ''
    for word in (commandline -opc)[2..-1]
        switch "$at/$word"
            case %(commands)s
                set at (string trim -- "$at $word")
        end
    end
    contains -- "$at" $argv
end
complete -c quire -f
%(lines)s
"""


def fish(tree: Sequence[Command]) -> str:
    lines: list[str] = []
    by_flag: dict[str, list[str]] = {}  # the options of `complete` for a flag: commands that have the flag
    for command in tree:
        at = _fish_at([command.path])
        for name, text in command.commands.items():
            lines.append(f"complete -c quire -n {at} -a {_fish_quote(name)} -d {_fish_quote(text)}")
        if command.values:
            lines.append(f"complete -c quire -n {at} -a {_fish_quote(' '.join(command.values))}")
        if command.files:
            lines.append(f"complete -c quire -n {at} -F")
        for flag in command.flags:
            by_flag.setdefault(_fish_flag(flag), []).append(command.path)
    lines += [f"complete -c quire -n {_fish_at(paths)} {options}" for options, paths in by_flag.items()]
    return _FISH % {"commands": " ".join(map(_fish_quote, _cases(tree))), "lines": "\n".join(lines)}


def _fish_at(paths: Sequence[str]) -> str:
    return _fish_quote(" ".join(["__quire_at", *(_fish_quote(path) for path in paths)]))


def _fish_flag(flag: Flag) -> str:
    words = []
    for name in flag.names:
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        words += [kind, name.lstrip("-")]
    if flag.value:
        words += ["-r", "-F"] if flag.files else ["-x"]
    if flag.choices:
        words += ["-a", _fish_quote(" ".join(flag.choices))]
    return " ".join([*words, "-d", _fish_quote(flag.help)])


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
