"""`quire run MODEL "prompt"`: complete a text and print it as it comes."""

import argparse
from typing import Any

from quire.cli.parser import load_engine, read_text, take_words
from quire.cli.sampling import add_sampling_arguments, sampling_params
from quire.config.args import add_cli_arguments
from quire.types.errors import ConfigError


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
    from quire.cli.sampling import print_stream

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
