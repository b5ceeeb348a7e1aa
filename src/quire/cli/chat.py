"""`quire chat MODEL`: a conversation in the terminal, streamed.

Each turn sends the whole history; the prefix cache makes that cheap.
"""

import argparse
import contextlib
import dataclasses
import json
import secrets
import sys
from pathlib import Path
from typing import Any

from quire.cli.parser import load_engine, replace_invalid_input, take_words
from quire.cli.run import SETTABLE, add_sampling_arguments, print_stream, sampling_values
from quire.config.args import add_cli_arguments, nearest
from quire.types.errors import ConfigError, RequestError
from quire.types.sampling import SamplingParams

SUMMARY = 'Type a message, or /help for commands such as "/set temperature 0"; Ctrl-C stops an answer, /exit or Ctrl-D ends.'
ROLES = ("system", "user", "assistant")
# command: argument and description
COMMANDS = {
    "/help": ("", "list the commands"),
    "/set": ("NAME VALUE", f"set a sampling parameter: {', '.join(SETTABLE)}"),
    "/show": ("", "show the model, the system prompt and the sampling parameters"),
    "/system": ("TEXT", "set the system prompt; without TEXT, remove it"),
    "/clear": ("", "forget the messages (also /reset)"),
    "/save": ("FILE", "write the conversation to a JSON file"),
    "/load": ("FILE", "continue a conversation from such a file"),
    "/exit": ("", "end, as Ctrl-D does"),
}
ALIASES = {"/reset": "/clear", "/quit": "/exit", "/bye": "/exit", "/?": "/help"}


class Conversation:
    """The messages so far and the sampling parameters of the next answer."""

    def __init__(self, engine: Any, values: dict[str, Any], system: str | None = None) -> None:
        self.engine = engine
        self.initial = dict(values)
        self.values = dict(values)
        self.system = system
        self.messages: list[dict[str, str]] = []

    def history(self) -> list[dict[str, str]]:
        """Return all messages, the system prompt first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def say(self, text: str) -> None:
        """Send one message and print the answer. A turn that is stopped or refused leaves the history unchanged."""
        message = {"role": "user", "content": text}
        try:
            tokenizer = self.engine.get_tokenizer()
            prompt = tokenizer.apply_chat_template([*self.history(), message], tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            params = SamplingParams(**self.values)
            answer = print_stream(self.engine, {"prompt": prompt, "prompt_token_ids": ids}, params)
        except KeyboardInterrupt:
            print("\n(stopped)")
            return
        except RequestError as error:
            print(f"\n{error}", file=sys.stderr)
            return
        print()
        self.messages += [message, {"role": "assistant", "content": answer}]


def run_command(conversation: Conversation, name: str, argument: str) -> str:
    """Carry out one command and return what to print."""
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        hint = nearest(name, [*COMMANDS, *ALIASES]) or "; /help lists the commands."
        return f"unknown command {name}{hint} To send it as a message, begin with a space"
    if argument and not COMMANDS[name][0]:
        return f"{name} takes no argument; got {argument!r}"
    match name:
        case "/set":
            return _set(conversation, argument)
        case "/show":
            return _show(conversation)
        case "/system":
            conversation.system = argument or None
            return "the system prompt is set" if argument else "the system prompt is removed"
        case "/clear":
            conversation.messages = []
            return "the conversation is cleared; system prompt and settings stay"
        case "/save":
            return _save(conversation, argument)
        case "/load":
            return _load(conversation, argument)
    return _help()


def _set(conversation: Conversation, argument: str) -> str:
    name, _, text = argument.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if name not in SETTABLE:
        known = f"known are {', '.join(SETTABLE)}"
        return f"/set {name}: unknown name{nearest(name, list(SETTABLE))}; {known}" if name else f"/set NAME VALUE: {known}"
    if not text:
        return f"/set {name}: a value is missing, as in /set {name} {SETTABLE[name][1]}; `default` restores the first one"
    values = dict(conversation.values)
    try:
        if text == "default":
            values.pop(name, None)
            values.update({name: conversation.initial[name]} if name in conversation.initial else {})
        else:
            values[name] = SETTABLE[name][0](text)
        SamplingParams(**values)
    except RequestError as error:
        return f"/set {name}: {error}"
    except ValueError:
        return f"/set {name}: the value must be like {SETTABLE[name][1]}; got {text!r}"
    conversation.values = values
    return f"{name} = {_shown(values, name)}"


def _show(conversation: Conversation) -> str:
    engine, count = conversation.engine, len(conversation.messages)
    lines = [f"model {engine.config.args.model}, context {engine.max_model_len} tokens, {count} messages so far"]
    lines.append(f"system prompt: {conversation.system or 'none'}")
    lines += [f"  {name:<20} {_shown(conversation.values, name)}" for name in SETTABLE]
    return "\n".join(lines)


def _shown(values: dict[str, Any], name: str) -> str:
    value = values.get(name, getattr(SamplingParams(), name))
    return "none" if value is None or value == [] else json.dumps(value, ensure_ascii=False)


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        return "/save: a file name is missing, as in /save talk.json"
    text = json.dumps({"messages": conversation.history()}, ensure_ascii=False, indent=2)
    try:
        # input that is not UTF-8 has lone surrogates; a backslash escape of one is its JSON form
        Path(argument).expanduser().write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))
    except (OSError, RuntimeError, ValueError) as error:
        return f"/save: cannot write {argument}: {error}"
    return f"saved {len(conversation.messages)} messages to {argument}"


def _load(conversation: Conversation, argument: str) -> str:
    if not argument:
        return "/load: a file name is missing, as in /load talk.json"
    try:
        found = json.loads(Path(argument).expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError) as error:
        return f"/load: cannot read {argument}: {error}"
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return f'/load: {argument} must hold {{"messages": [{{"role": "user", "content": "..."}}, ...]}}'
    head = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    conversation.system = head
    conversation.messages = messages if head is None else messages[1:]
    return f"loaded {len(conversation.messages)} messages from {argument}"


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _help() -> str:
    rows = [(f"{name} {takes}".strip(), what) for name, (takes, what) in COMMANDS.items()]
    rows += [('"""', "begin and end a message of several lines"), ("Ctrl-C", "stop an answer")]
    return "\n".join(["commands", *(f"  {usage:<18} {what}" for usage, what in rows)])


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
