"""`quire chat MODEL`: a conversation in the terminal, streamed.

Each turn sends the whole history; the prefix cache makes that cheap.
"""

import argparse
import contextlib
import dataclasses
import secrets
import sys
from typing import Any

from quire.cli.chat_commands import ALIASES, SUMMARY, Conversation, run_command
from quire.cli.sampling import add_sampling_arguments, sampling_values
from quire.cli.words import load_engine, replace_invalid_input, take_words
from quire.config.args import add_cli_arguments
from quire.types.errors import ConfigError

BLOCK_MARK = '"""'  # begins and ends a message of several lines


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        usage="%(prog)s [MODEL] [MESSAGE] [options]",
        help="talk with a model in the terminal",
        description=f"A conversation in the terminal. {SUMMARY}",
    )
    parser.add_argument(
        "words", nargs="*", metavar="MODEL MESSAGE",
        help="the model, as in --model, and a first message in quotes; without a terminal its answer is all that is printed",
    )  # fmt: skip
    parser.add_argument("--system", default=None, help="the system prompt")
    add_sampling_arguments(parser, max_tokens=512)
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args, messages = take_words(namespace, namespace.words)
    if len(messages) > 1:
        raise ConfigError(f"one message at a time, in quotes; got {len(messages)}")
    sampling_values(namespace)  # wrong flags are reported before the model is loaded
    if "seed" not in vars(namespace):  # with a fixed one, the first answer would be the same in every conversation
        args = dataclasses.replace(args, seed=secrets.randbits(32))
    engine = load_engine(args)
    values = sampling_values(namespace, engine.config.default_sampling)
    conversation = Conversation(engine, values, namespace.system)
    terminal = sys.stdin.isatty()
    replace_invalid_input()
    for message in messages:
        if terminal:
            print(f">>> {message}")
        conversation.say(message)
    if terminal:
        with contextlib.suppress(ImportError):  # line editing and history for input()
            import readline  # noqa: F401
        print(f"({SUMMARY})")
    return converse(conversation, terminal)


def converse(conversation: Conversation, terminal: bool = True) -> int:
    """Read messages and commands until /exit or the end of input. Without a terminal, standard output holds only answers."""
    notes = sys.stdout if terminal else sys.stderr
    while True:
        try:
            text = read_message(terminal)
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print()
            return 0
        if not is_command(text):
            if text.strip():
                conversation.say(text.strip())
            continue
        name, _, argument = text.strip().partition(" ")
        if ALIASES.get(name, name) == "/exit":
            return 0
        print(f"({run_command(conversation, name, argument.strip())})", file=notes)


def is_command(text: str) -> bool:
    """A line such as `/set temperature 0`. A path (`/usr/bin ...`) or a line that begins with a space is a message."""
    return text.startswith("/") and "/" not in text.split(maxsplit=1)[0][1:] and "\n" not in text


def read_message(terminal: bool) -> str:
    """Return one line, or the lines between two marks of triple quotes."""
    line = input(">>> " if terminal else "")
    if not line.strip().startswith(BLOCK_MARK):
        return line
    lines = [line.strip().removeprefix(BLOCK_MARK)]
    while not lines[-1].rstrip().endswith(BLOCK_MARK):
        lines.append(input("... " if terminal else ""))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK_MARK)
    return " " + "\n".join(lines).strip("\n")  # never a command
