"""An argument parser in vLLM's manner: `_` is `-` in flags, nothing is guessed from prefixes, typos get suggestions, help is
short unless more is asked for (`help.py`).

Flags may have dots (`dotted.py`), come from a file (`config_file.py`), and be said to be true or false (`--flag=false`).
"""

import argparse
import dataclasses
import io
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire.cli.help import help_about, short_help, unknown_topic
from quire.config.args import EngineArgs, nearest, one_at_a_time
from quire.config.flags import read_loosely
from quire.files.wheel import ALIASES
from quire.progress import doing, shown
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm_engine import LLMEngine

FLAG = "--config"


def take_config(args: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without the file, and the file. Only the last one is read."""
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
    """As they would stand on the command line. `_` is `-`."""
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
    """The arguments without those that are keys of `flags`, and what these say."""
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
        _put(found.setdefault(flag, {}), key.split("."), read_loosely(text))
    return rest, found


def merged(old: Any, new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` over `old`, key by key; lists that were added to go on."""
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
    """Nobody would ask that: an alias, a path of a model, or a hub id (organisation/name)."""
    if word in ALIASES or _holds_model(word):
        return True
    if not word or any(letter.isspace() for letter in word):
        return False
    return word.endswith(".gguf") or word.startswith(("/", "./", "../", "~/")) or _HUB_ID.fullmatch(word) is not None


def take_words(namespace: argparse.Namespace, words: list[str]) -> tuple[EngineArgs, list[str]]:
    """The engine's arguments, and the texts. A lone word is a text unless it names a model; of several the first is the model,
    unless --model was given."""
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
    """For one request at a time, while something moves on the terminal."""
    with shown(), doing(f"loading {args.model}"):
        from quire.llm_engine import LLMEngine

        return LLMEngine.from_engine_args(one_at_a_time(args))


def _holds_model(word: str) -> bool:
    try:
        path = Path(word).expanduser()
        return path.is_file() if path.suffix == ".gguf" else (path / "config.json").is_file() or any(path.glob("*.gguf"))
    except (OSError, RuntimeError, ValueError):  # too long for a name, no such user
        return False


WORDS = "words"  # what a command calls its positional arguments if they may stand anywhere among the flags


class CommandParser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        args = with_dashes(sys.argv[1:] if args is None else args)
        self._tell_about(args)
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
        """`--flag=true` and `--flag=false` of a flag without a value."""
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
        """What the file says, and the command line does not. A model there gives way to one that is named by its place."""
        given = {action.dest for text in args if (action := self._option_string_actions.get(text.partition("=")[0]))}
        try:
            told = flags_of(read_config(file), self._option_string_actions)
        except ConfigError as error:
            self.error(str(error))
        read: argparse.Namespace
        read, rest = super().parse_known_args(told, namespace)
        for text in rest:
            flag = text.partition("=")[0]
            self.error(f"{file}: unknown option {flag}{nearest(flag, self._alike(flag))}")
        positional = {action.dest for action in self._get_positional_actions()}
        asked = argparse.Namespace()
        _, more = super().parse_known_args(list(args), asked)
        words = [*getattr(asked, WORDS, []), *more]
        if getattr(asked, "model_tag", None) is not None or (words and names_model(words[0])):
            given.add("model")
        for name in (given | positional) & set(vars(read)):
            delattr(read, name)
        return read

    def format_help(self) -> str:
        return short_help(self)

    def error(self, message: str) -> NoReturn:
        """One line: the list of all flags is `--help`'s to tell."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _tell_about(self, args: list[str]) -> None:
        """`--help=TOPIC`, unless it is a command's."""
        before = args[: args.index("--")] if "--" in args else args
        asked = next((text for text in before if text.startswith("--help=")), None)
        if asked is None or (self._subparsers is not None and not before[0].startswith("-")):
            return
        topic = asked.partition("=")[2]
        told = help_about(self, topic)
        if told is None:
            self.error(unknown_topic(self, topic))
        print(told, end="")
        self.exit(0)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(name) for name in action.choices]
        meant = nearest(str(value), names)
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"unknown {str(action.metavar).lower()} {value!r}{meant or '; there are ' + ', '.join(names)}")
        self.error(f"{'/'.join(action.option_strings)} must be one of {', '.join(names)}; got {value!r}{meant}")

    def _refuse(self, text: str) -> NoReturn:
        flag = text.partition("=")[0]
        self.error(f"unknown option {flag}{nearest(flag, self._alike(flag))}")

    def _alike(self, flag: str) -> list[str]:
        """Return the flags that a typo may mean: also hints and refused ones, whose own message says why they do nothing."""
        return [name for name in self._option_string_actions if name.startswith("--no-") <= flag.startswith("--no-")]


def with_dashes(args: Sequence[str]) -> list[str]:
    """Flags with `_` become flags with `-`; values, and all that follows `--`, stay as they are."""
    out = list(args)
    for index, text in enumerate(out):
        if text == "--":
            break
        if text.startswith("--"):
            flag, equals, value = text.partition("=")
            name, dot, key = flag.partition(".")
            out[index] = f"{name.replace('_', '-')}{dot}{key}{equals}{value}"
    return out
