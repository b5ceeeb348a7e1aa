"""`quire run MODEL "prompt"`: complete a text and print it as it is generated. Also the sampling flags of `quire chat`."""

import argparse
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.cli.parser import load_engine, read_text, take_words
from quire.config.args import add_cli_arguments
from quire.step_loop import interrupts_between_steps
from quire.types.errors import ConfigError, EngineError
from quire.types.prompts import PromptType
from quire.types.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.llm_engine import LLMEngine


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        usage="%(prog)s [MODEL] [PROMPT ...] [options]",
        help="complete a prompt and print the text as it is generated",
        description="Completes each prompt and prints it. A prompt alone goes to the default model. Without any, standard "
        "input is read.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="MODEL PROMPT", help="the model, as in --model, and one or more prompts, each in quotes"
    )
    parser.add_argument("--chat", action="store_true", help="wrap the prompt as a user message in the model's chat template")
    add_sampling_arguments(parser, max_tokens=128)
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args, prompts = take_words(namespace, namespace.words)
    sampling_params(namespace)  # reports wrong flags before the model is loaded
    prompts = prompts or [read_text("run", args.model)]
    if not all(prompts):
        raise ConfigError('a prompt is empty: quire run MODEL "The capital of France is"')
    engine = load_engine(args)
    params = sampling_params(namespace, engine.config.default_sampling)
    for index, prompt in enumerate(prompts):
        if index:
            print()
        if namespace.chat:
            text = engine.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            ids = engine.get_tokenizer().encode(text, add_special_tokens=False)
            print_stream(engine, {"prompt": text, "prompt_token_ids": ids}, params)
        else:
            print(prompt, end="", flush=True)
            print_stream(engine, prompt, params)
        print()
    return 0


_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "randomness, 0 is greedy"),
    ("top_p", float, "sample from the most likely tokens up to this probability mass"),
    ("top_k", int, "sample from this number of most likely tokens, 0 is all"),
    ("min_p", float, "drop tokens less likely than this fraction of the most likely one"),
    ("repetition_penalty", float, "above 1 discourages tokens of the prompt and the answer"),
    ("presence_penalty", float, "discourages tokens that were generated before"),
    ("frequency_penalty", float, "the same, more with every occurrence"),
    ("sampling_seed", int, "the same seed gives the same text"),
)

# parameters that `/set` of `quire chat` changes: conversion of the text, and an example
SETTABLE: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "512"),
    "temperature": (float, "0.7"),
    "top_p": (float, "0.9"),
    "top_k": (int, "40"),
    "min_p": (float, "0.05"),
    "repetition_penalty": (float, "1.1"),
    "presence_penalty": (float, "0.5"),
    "frequency_penalty": (float, "0.5"),
    "seed": (int, "1"),
    "stop": (lambda text: [text], "END"),
}


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=f"maximum of generated tokens (default {max_tokens})")
    for name, kind, text in _FLAGS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=f"{text} (default: the model's own)")
    group.add_argument("--stop", action="append", default=None, help="end before this text; may be given several times")


def sampling_values(namespace: argparse.Namespace, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the command line's sampling parameters over the model's defaults, checked."""
    values: dict[str, Any] = {**(defaults or {}), "max_tokens": namespace.max_tokens}
    for name, _, _ in _FLAGS:
        value = getattr(namespace, name)
        if value is not None:
            values["seed" if name == "sampling_seed" else name] = value
    if namespace.stop:
        values["stop"] = namespace.stop
    SamplingParams(**values)
    return values


def sampling_params(namespace: argparse.Namespace, defaults: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(**sampling_values(namespace, defaults))


_ids = itertools.count()


def print_stream(engine: "LLMEngine", prompt: PromptType, params: SamplingParams) -> str:
    """Generate, print the text as it comes, and return it. Ctrl-C ends the request and is raised."""
    request_id = f"cli-{next(_ids)}"
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request(request_id, prompt, params)
    parts: list[str] = []
    try:
        with interrupts_between_steps() as check:
            while engine.has_unfinished_requests():
                check()
                for output in engine.step_requests():
                    for choice in output.outputs:
                        print(choice.text, end="", flush=True)
                        parts.append(choice.text)
                        if choice.error:
                            raise EngineError(choice.error)
    finally:
        engine.abort_request(request_id)
    return "".join(parts)
