"""An argument parser with vLLM's conventions: `_` is `-` in flags, no abbreviations, suggestions for typos, help in sections.


Flags may have dots (`--flag.key value`), come from a file (`--config`), and be set to true or false (`--flag=false`).
"""

import argparse
import dataclasses
import io
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.args import EngineArgs, nearest, one_at_a_time
from quire.config.flags import read_untyped
from quire.files.wheel import ALIASES
from quire.progress import doing, shown
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm_engine import LLMEngine


FLAG = "--config"


def take_config(args: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the arguments without `--config FILE`, and the file. Only the last file is read."""
    rest: list[str] = []
    file, texts = None, iter(args)
    for text in texts:
        if text == "--":
            return [*rest, text, *texts], file
        if text == FLAG:
            file = next(texts, "")
        elif text.startswith(f"{FLAG}="):
            file = text.partition("=")[2]
        else:
            rest.append(text)
    return rest, file


def read_config(name: str) -> dict[str, Any]:
    import yaml  # comes with huggingface_hub

    path = Path(name).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"--config takes a YAML file, whose name ends with .yaml or .yml; got {name!r}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {name} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {name} must map the names of flags to their values")
    return content


def flags_of(content: Mapping[str, Any], actions: Mapping[str, argparse.Action]) -> list[str]:
    """Return the content of a file as command line arguments. `_` is `-`."""
    out: list[str] = []
    for key, value in content.items():
        flag = f"--{key.strip().lstrip('-').replace('_', '-')}"
        if flag == FLAG:
            raise ConfigError("a file of flags cannot name another one")
        switch = isinstance(actions.get(flag), argparse.BooleanOptionalAction) or getattr(actions.get(flag), "nargs", 1) == 0
        match value:
            case None:
                continue
            case True if switch:
                out.append(flag)
            case False if switch:
                out += [f"--no-{flag[2:]}"] if f"--no-{flag[2:]}" in actions else []
            case dict():
                out.append(f"{flag}={json.dumps(value)}")
            case list():
                out += [flag, *map(_text, value)] if value else []
            case _:
                out.append(f"{flag}={_text(value)}")
    return out


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


Found = dict[str, dict[str, Any]]  # by flag


def take_dotted(args: Sequence[str], flags: Collection[str]) -> tuple[list[str], Found]:
    """Return the arguments without those of the form `--flag.key`, and the values of these by flag."""
    rest: list[str] = []
    found: Found = {}
    texts = iter(range(len(args)))
    for i in texts:
        flag, dot, key = args[i].partition(".")
        if args[i] == "--":
            rest += args[i:]
            break
        if not dot or flag not in flags:
            rest.append(args[i])
            continue
        key, equals, text = key.partition("=")
        if not equals:
            text = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else "true"
            if i + 1 < len(args) and not args[i + 1].startswith("--"):
                next(texts)
        _put(found.setdefault(flag, {}), key.split("."), read_untyped(text))
    return rest, found


def merged(old: Any, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` updated with `new`, key by key; a key that ends with `+` extends the list."""
    out = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        name = key.removesuffix("+")
        if key.endswith("+"):
            before = out.get(name)
            out[name] = [*(before if isinstance(before, list) else []), *value]
        else:
            out[name] = merged(out.get(name), value) if isinstance(value, Mapping) else value
    return out


def _put(where: dict[str, Any], path: list[str], value: Any) -> None:
    *above, last = path
    for key in above:
        below = where.get(key)
        where[key] = where = below if isinstance(below, dict) else {}
    if last.endswith("+"):
        where.setdefault(last, []).append(value)
    else:
        where[last] = value


def add_model_tag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the model, as in --model")


def engine_args(namespace: argparse.Namespace) -> EngineArgs:
    args = EngineArgs.from_cli(namespace)
    if namespace.model_tag is None:
        return args
    if "model" in vars(namespace):
        raise ConfigError(f"the model was given twice: {namespace.model_tag!r} and --model {args.model!r}; drop one")
    return dataclasses.replace(args, model=namespace.model_tag)


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./+-]+\.gguf|:[\w.-]+)?", re.ASCII)


def names_model(word: str) -> bool:
    """Return whether a word can only mean a model: an alias, a path of a model, or a hub id (organisation/name)."""
    if word in ALIASES or _holds_model(word):
        return True
    if not word or any(letter.isspace() for letter in word):
        return False
    return word.endswith(".gguf") or word.startswith(("/", "./", "../", "~/")) or _HUB_ID.fullmatch(word) is not None


def take_words(namespace: argparse.Namespace, words: list[str]) -> tuple[EngineArgs, list[str]]:
    """Return the engine's arguments, and the texts.

    A single word is a text unless it names a model. Of several words the first is the model, unless --model is given.
    """
    args = EngineArgs.from_cli(namespace)
    given = "model" in vars(namespace)
    if given:
        if len(words) > 1 and names_model(words[0]):
            raise ConfigError(f"the model was given twice: {words[0]!r} and --model {args.model!r}; drop one")
        return args, words
    if not words or (len(words) == 1 and not names_model(words[0])):
        return args, words
    model, *texts = words
    if any(letter.isspace() for letter in model) and not _holds_model(model):
        raise ConfigError(
            f"of several arguments the first is the model, and {model!r} is none; for several prompts write "
            f"`quire {namespace.command} {args.model} PROMPT PROMPT ...`, and one prompt in quotes"
        )
    return dataclasses.replace(args, model=model), texts


def read_text(command: str, model: str) -> str:
    """Return the text of standard input. Raises ConfigError with advice if it is empty."""
    if sys.stdin.isatty():
        raise ConfigError(f'there is no prompt: quire {command} {model} "The capital of France is"')
    replace_invalid_input()
    text = sys.stdin.read()
    if not text.strip():
        raise ConfigError(f'there is no prompt: standard input is empty; quire {command} {model} "The capital of France is"')
    return text


def replace_invalid_input() -> None:
    """Read bytes of standard input that are not UTF-8 as U+FFFD, instead of failing."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def load_engine(args: EngineArgs) -> "LLMEngine":
    """Load an engine for one request at a time, with a progress display."""
    with shown(), doing(f"loading {args.model}"):
        from quire.llm_engine import LLMEngine

        return LLMEngine.from_engine_args(one_at_a_time(args))


def _holds_model(word: str) -> bool:
    try:
        path = Path(word).expanduser()
        return path.is_file() if path.suffix == ".gguf" else (path / "config.json").is_file() or any(path.glob("*.gguf"))
    except (OSError, RuntimeError, ValueError):  # too long for a name, no such user
        return False


WORDS = "words"  # the name of positional arguments that may stand anywhere among the flags


class CommandParser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        args = with_dashes(sys.argv[1:] if args is None else args)
        self._print_help_about(args)
        args, dotted = take_dotted(self._plain(args), self._option_string_actions)
        if "--config" in self._option_string_actions:
            args, file = take_config(args)
            if file is not None:
                namespace = self._read(file, args, namespace)
        found, rest = super().parse_known_args(args, namespace)
        for flag, keys in dotted.items():
            name = self._option_string_actions[flag].dest
            setattr(found, name, merged(getattr(found, name, None), keys))
        for text in rest:
            if text.startswith("-") and " " not in text:
                self._refuse(text)
        if WORDS in vars(found):
            found.words, rest = [*found.words, *rest], []
        return found, rest

    def _plain(self, args: Sequence[str]) -> list[str]:
        """Replace `--flag=true` and `--flag=false` of a flag without a value by `--flag` and `--no-flag`."""
        out = []
        for text in args:
            flag, equals, value = text.partition("=")
            action = self._option_string_actions.get(flag)
            if equals and isinstance(action, argparse.BooleanOptionalAction) and value.lower() in ("true", "false"):
                other = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
                out.append(flag if value.lower() == "true" else other)
            else:
                out.append(text)
        return out

    def _read(self, file: str, args: Sequence[str], namespace: Any) -> argparse.Namespace:
        """Return the values of the file that the command line does not set. A positional model overrides the file's."""
        given = {action.dest for text in args if (action := self._option_string_actions.get(text.partition("=")[0]))}
        try:
            options = flags_of(read_config(file), self._option_string_actions)
        except ConfigError as error:
            self.error(str(error))
        read: argparse.Namespace
        read, rest = super().parse_known_args(options, namespace)
        for text in rest:
            flag = text.partition("=")[0]
            self.error(f"{file}: unknown option {flag}{nearest(flag, self._alike(flag))}")
        positional = {action.dest for action in self._get_positional_actions()}
        direct = argparse.Namespace()
        _, more = super().parse_known_args(list(args), direct)
        words = [*getattr(direct, WORDS, []), *more]
        if getattr(direct, "model_tag", None) is not None or (words and names_model(words[0])):
            given.add("model")
        for name in (given | positional) & set(vars(read)):
            delattr(read, name)
        return read

    def format_help(self) -> str:
        return short_help(self)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit; `--help` lists all flags."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _print_help_about(self, args: list[str]) -> None:
        """Handle `--help=TOPIC`, unless it belongs to a command."""
        before = args[: args.index("--")] if "--" in args else args
        option = next((text for text in before if text.startswith("--help=")), None)
        if option is None or (self._subparsers is not None and not before[0].startswith("-")):
            return
        topic = option.partition("=")[2]
        text = help_about(self, topic)
        if text is None:
            self.error(unknown_topic(self, topic))
        print(text, end="")
        self.exit(0)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(name) for name in action.choices]
        meant = nearest(str(value), names)
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"unknown {str(action.metavar).lower()} {value!r}{meant or '; there are ' + ', '.join(names)}")
        name = "/".join(action.option_strings) or str(action.metavar)
        self.error(f"{name} must be one of {', '.join(names)}; got {value!r}{meant}")

    def _refuse(self, text: str) -> NoReturn:
        flag = text.partition("=")[0]
        self.error(f"unknown option {flag}{nearest(flag, self._alike(flag))}")

    def _alike(self, flag: str) -> list[str]:
        """Return the flags that a typo may mean: also hints and refused ones, whose own message says why they do nothing."""
        return [name for name in self._option_string_actions if name.startswith("--no-") <= flag.startswith("--no-")]


def with_dashes(args: Sequence[str]) -> list[str]:
    """Return the arguments with `-` for `_` in flags; values, and all that follows `--`, are unchanged."""
    out = list(args)
    for index, text in enumerate(out):
        if text == "--":
            break
        if text.startswith("--"):
            flag, equals, value = text.partition("=")
            name, dot, key = flag.partition(".")
            out[index] = f"{name.replace('_', '-')}{dot}{key}{equals}{value}"
    return out


SECTIONS_WIDTH = 78  # characters of a line that lists sections
SHORT_HELP_FLAGS = 30  # a command with more flags has a short help
# flags in the short help: of the engine, and of a server; a command's own are always listed
COMMON = frozenset({"model", "config", "dtype", "device", "max_model_len", "max_tokens", "temperature", "top_p"})
SERVING = COMMON | {
    "gpu_memory_utilization", "max_num_seqs", "served_model_name", "chat_template", "host", "port", "api_key",
    "tool_call_parser", "reasoning_parser",
}  # fmt: skip
LONG_SECTIONS = ("engine: ", "server: ", "sampling", "generated traffic")  # title prefixes of shortened sections
# vLLM's names of sections
KNOWN_AS = {
    "modelconfig": "engine: model", "loadconfig": "engine: model", "cacheconfig": "engine: cache and memory",
    "schedulerconfig": "engine: scheduler", "structuredoutputsconfig": "engine: lengths and sampling", "frontend": "server",
    "observabilityconfig": "server: logs and metrics",
}  # fmt: skip

Group = argparse._ArgumentGroup


def short_help(parser: argparse.ArgumentParser) -> str:
    """Return the whole help of a command with few flags; of others, common flags and a list of sections."""
    shown = {group: _visible(group) for group in parser._action_groups}
    if sum(map(len, shown.values())) < SHORT_HELP_FLAGS:
        return full_help(parser)
    common = SERVING if "--host" in parser._option_string_actions else COMMON
    listed = {group: [one for one in ones if _is_own(group) or one.dest in common] for group, ones in shown.items()}
    sections = _rows(f"{group.title} ({len(shown[group])})" for group in shown if group.title and listed[group] != shown[group])
    more = [
        "more options, by section:", *sections, "",
        f"{parser.prog} --help=all lists every option, --help=SECTION those of a section, --help=WORD those with a word",
    ]  # fmt: skip
    return _format(parser, listed) + "\n" + "\n".join(more) + "\n"


def _rows(items: Iterable[str]) -> list[str]:
    """Join items to lines of limited width; no item is broken."""
    rows: list[str] = []
    for item in items:
        if rows and len(rows[-1]) + len(item) + 2 <= SECTIONS_WIDTH:
            rows[-1] += f", {item}"
        else:
            rows.append(f"  {item}")
    return rows


def full_help(parser: argparse.ArgumentParser) -> str:
    return _format(parser, {group: _visible(group) for group in parser._action_groups})


def help_about(parser: argparse.ArgumentParser, topic: str) -> str | None:
    """Return the help of all flags, a section, a flag or a word; None if nothing matches."""
    word = topic.strip().lower()
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
        matching = exact or [action for action in parser._actions if _mentions(action, name)]
        found = {group: [action for action in actions if action in matching] for group, actions in groups.items()}
    return _format(parser, found, alone=True) if any(found.values()) else None


def unknown_topic(parser: argparse.ArgumentParser, topic: str) -> str:
    names = [name for group in parser._action_groups for name in _names(group)]
    meant = nearest(topic.lower(), names)
    return f"--help={topic}: there is no such section or option{meant or '; --help=listgroup lists the sections'}"


def _visible(group: Group) -> list[argparse.Action]:
    return [action for action in group._group_actions if action.help is not argparse.SUPPRESS]


def _is_own(group: Group) -> bool:
    return not (group.title or "").startswith(LONG_SECTIONS)


def _names(group: Group) -> set[str]:
    """Return the names of a section: `engine: cache and memory` is also `engine` and `cache and memory`."""
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
