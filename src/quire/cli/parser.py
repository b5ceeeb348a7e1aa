"""An argument parser in vLLM's manner: `_` is `-` in flags, nothing is guessed from prefixes, typos get suggestions."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from quire.config.args import nearest


class Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if args is not None:
            args = with_dashes(args)
        found, rest = super().parse_known_args(args, namespace)
        for text in rest:
            if text.startswith("-"):
                self._refuse(text)
        return found, rest

    def error(self, message: str) -> NoReturn:
        """One line: the list of all flags is `--help`'s to tell."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _refuse(self, text: str) -> NoReturn:
        flag = text.partition("=")[0]
        shown = [name for name, action in self._option_string_actions.items() if action.help is not argparse.SUPPRESS]
        self.error(f"unknown option {flag}{nearest(flag, shown)}")


def with_dashes(args: Sequence[str]) -> list[str]:
    """Flags with `_` become flags with `-`; values, and all that follows `--`, stay as they are."""
    out = list(args)
    for index, text in enumerate(out):
        if text == "--":
            break
        if text.startswith("--"):
            flag, equals, value = text.partition("=")
            out[index] = f"--{flag[2:].replace('_', '-')}{equals}{value}"
    return out
