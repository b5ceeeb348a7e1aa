"""`quire`: the front door. Errors that Quire raises on purpose are one line, not a traceback."""

import importlib
import os
import sys
from collections.abc import Sequence

from quire import __version__
from quire.cli.parser import Parser
from quire.types.errors import ConfigError, QuireError, RequestError

COMMANDS = ("serve", "run", "chat", "plan", "models", "bench")
WRONG_USE, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    namespace = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    if not hasattr(namespace, "run"):
        parser.print_help()
        return WRONG_USE
    try:
        return int(namespace.run(namespace))
    except QuireError as error:
        print(f"quire {namespace.command}: {error}", file=sys.stderr)
        return WRONG_USE if isinstance(error, ConfigError | RequestError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def make_parser() -> Parser:
    parser = Parser(prog="quire", description="A high-throughput LLM inference and serving engine.")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"quire.cli.{name}").add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
