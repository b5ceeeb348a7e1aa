"""`quire chat MODEL`: a conversation in the terminal, streamed. Each turn has the whole history; the cache makes that cheap."""

import argparse
import sys
from typing import Any

from quire.cli.sampling import add_sampling_arguments, sampling_params
from quire.cli.words import load_engine, take_words
from quire.config.args import add_cli_arguments, nearest
from quire.types.errors import ConfigError

COMMANDS = {"/reset": "forgets the conversation", "/help": "lists these", "/exit": "ends, as Ctrl-D does"}
HELP = f"{', '.join(f'{name} {what}' for name, what in COMMANDS.items())}; Ctrl-C stops an answer"
SAME = {"/quit": "/exit", "/bye": "/exit", "/clear": "/reset", "/?": "/help"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        usage="%(prog)s [MODEL] [MESSAGE] [options]",
        help="talk with a model in the terminal",
        description=f"A conversation in the terminal. {HELP}.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="MODEL MESSAGE",
        help="the model, as in --model, and a first message in quotes; without a terminal its answer is all that is printed",
    )  # fmt: skip
    parser.add_argument("--system", default=None, help="a system message to begin with")
    add_sampling_arguments(parser, max_tokens=512)
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args, messages = take_words(namespace, namespace.words)
    if len(messages) > 1:
        raise ConfigError(f"one message at a time, in quotes; got {len(messages)}")
    sampling_params(namespace)  # wrong flags are told before the model is loaded
    engine = load_engine(args)
    params = sampling_params(namespace, engine.config.default_sampling)
    opening = [{"role": "system", "content": namespace.system}] if namespace.system else []
    conversation = Conversation(engine, params, opening)
    terminal = sys.stdin.isatty()
    for message in messages:
        if terminal:
            print(f">>> {message}")
        conversation.say(message)
    if terminal:
        print(f"({HELP})")
    return converse(conversation, terminal)


class Conversation:
    def __init__(self, engine: Any, params: Any, opening: list[dict[str, str]]) -> None:
        self.engine = engine
        self.params = params
        self.opening = opening
        self.messages = list(opening)

    def reset(self) -> None:
        self.messages = list(self.opening)

    def say(self, text: str) -> None:
        """One turn. A turn that is stopped or refused leaves the history as it was."""
        from quire.cli.stream import print_stream
        from quire.types.errors import RequestError

        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            tokenizer = self.engine.get_tokenizer()
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            answer = print_stream(self.engine, {"prompt": prompt, "prompt_token_ids": ids}, self.params)
        except KeyboardInterrupt:
            print("\n(stopped)")
            return
        except RequestError as error:
            print(f"\n{error}", file=sys.stderr)
            return
        print()
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def converse(conversation: Conversation, terminal: bool = True) -> int:
    """Without a terminal there is nothing but answers on standard output."""
    notes = sys.stdout if terminal else sys.stderr
    while True:
        try:
            line = input(">>> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print()
            return 0
        if not line.startswith("/") or " " in line:  # a path or a division is no command
            if line:
                conversation.say(line)
            continue
        match SAME.get(line, line):
            case "/exit":
                return 0
            case "/reset":
                conversation.reset()
                print("(the conversation is forgotten)", file=notes)
            case "/help":
                print(f"({HELP})", file=notes)
            case unknown:
                print(f"(unknown command {unknown}{nearest(unknown, list(COMMANDS))}; {HELP})", file=notes)
