"""What the words of `quire run` and `quire chat` are: MODEL TEXT..., or TEXT alone for the default model."""

import argparse
import dataclasses
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.args import EngineArgs, one_at_a_time
from quire.files.wheel import ALIASES
from quire.progress import doing, shown
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm_engine import LLMEngine

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
    """Of standard input. Whoever types nothing into it is told what to do."""
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
