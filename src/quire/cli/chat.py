"""`quire chat`: a conversation in the terminal, streamed, with the whole history each turn (the cache makes that cheap)."""

import argparse
import sys
from typing import Any

from quire.cli.sampling import add_sampling_arguments, sampling_params
from quire.config.args import EngineArgs, add_cli_arguments, one_at_a_time

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description=f"A conversation in the terminal. {HELP}.",
    )
    parser.add_argument("message", nargs="?", help="a first message; without a terminal its answer is printed and that is all")
    parser.add_argument("--system", default=None, help="a system message to begin with")
    add_sampling_arguments(parser, max_tokens=512)
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args = one_at_a_time(EngineArgs.from_cli(namespace))
    sampling_params(namespace)  # wrong flags are told before the model is loaded
    from quire.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(args)
    params = sampling_params(namespace, engine.config.default_sampling)
    opening = [{"role": "system", "content": namespace.system}] if namespace.system else []
    conversation = Conversation(engine, params, opening)
    if namespace.message:
        print(f">>> {namespace.message}")
        conversation.say(namespace.message)
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                conversation.say(line.strip())
        return 0
    print(f"({HELP})")
    return converse(conversation)


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


def converse(conversation: Conversation) -> int:
    while True:
        try:
            line = input(">>> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line == "/exit":
            return 0
        if line == "/reset":
            conversation.reset()
        elif line:
            conversation.say(line)
