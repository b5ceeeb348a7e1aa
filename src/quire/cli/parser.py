"""An argument parser in vLLM's manner: `_` is `-` in flags, nothing is guessed from prefixes, typos get suggestions, help is
short unless more is asked for (`help.py`).

Flags may have dots (`dotted.py`), come from a file (`config_file.py`), and be said to be true or false (`--flag=false`).
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from quire.cli.config_file import flags_of, read_config, take_config
from quire.cli.dotted import merged, take_dotted
from quire.cli.help import help_about, short_help, unknown_topic
from quire.cli.words import names_model
from quire.config.args import nearest
from quire.types.errors import ConfigError

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
            self.error(f"{file}: unknown option {flag}{nearest(flag, self._shown())}")
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
        self.error(f"unknown option {flag}{nearest(flag, self._shown())}")

    def _shown(self) -> list[str]:
        return [name for name, action in self._option_string_actions.items() if action.help is not argparse.SUPPRESS]


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
