"""`quire`: the command line. Errors that Quire raises on purpose are one line, not a traceback."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire import __version__
from quire.types.errors import ConfigError, QuireError, RequestError

if TYPE_CHECKING:
    from quire.cli.parser import CommandParser

COMMANDS = (
    "serve", "run", "chat", "run-batch", "plan", "simulate", "models", "pull", "rm", "complete", "top", "bench",
    "doctor", "collect-env", "completion",
)  # fmt: skip
EXAMPLES = """examples:
  quire chat                               talk with the small default model
  quire run smollm2 "The capital of France is"
  quire serve ./my-model --port 8000       a directory, a .gguf file, a hub id or an alias
  quire COMMAND --help                     the options of a command"""
WRONG_USE, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    line = sys.argv[1:] if argv is None else list(argv)
    if line in (["-v"], ["--version"]):
        print(__version__)
        return 0
    if line[:1] == ["help"]:
        line = [*line[1:], "--help"]
    try:
        return _run(line)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(line: Sequence[str]) -> int:
    parser = make_parser(line[:1] if line[:1] and line[0] in COMMANDS else COMMANDS)
    namespace = parser.parse_args(line)
    if not hasattr(namespace, "run"):
        parser.print_help()
        return WRONG_USE
    try:
        return int(namespace.run(namespace))
    except QuireError as error:
        print(f"quire {namespace.command}: {error}", file=sys.stderr)
        return WRONG_USE if isinstance(error, ConfigError | RequestError) else FAILED


def make_parser(commands: Sequence[str] = COMMANDS) -> "CommandParser":
    """Return a parser of these commands. Each has a module, with `_` for `-`, which is imported."""
    from quire.cli.parser import CommandParser

    parser = CommandParser(
        prog="quire",
        usage="%(prog)s COMMAND [MODEL] [options]",
        description="A high-throughput LLM inference and serving engine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", prog="quire")
    for name in commands:
        importlib.import_module(f"quire.cli.{name.replace('-', '_')}").add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
