"""`quire run "prompt"`: complete a text and print it as it comes."""

import argparse
import sys
from typing import Any

from quire.cli.sampling import add_sampling_arguments, sampling_params
from quire.config.args import EngineArgs, add_cli_arguments, one_at_a_time


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="complete a prompt and print the text as it is generated",
        description="Completes each prompt and prints it. Without a prompt, reads one from standard input.",
    )
    parser.add_argument("prompt", nargs="*", help="one or more prompts; standard input when none is given")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt as a user message in the model's chat template")
    add_sampling_arguments(parser, max_tokens=128)
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    prompts = namespace.prompt or [sys.stdin.read()]
    args = one_at_a_time(EngineArgs.from_cli(namespace))
    sampling_params(namespace)  # wrong flags are told before the model is loaded
    from quire.cli.stream import print_stream
    from quire.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(args)
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
