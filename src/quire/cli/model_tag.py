"""The model as the first word of a command, and the engine's arguments behind it."""

import argparse
import dataclasses

from quire.config.args import EngineArgs
from quire.types.errors import ConfigError


def add_model_tag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the model, as in --model")


def engine_args(namespace: argparse.Namespace) -> EngineArgs:
    args = EngineArgs.from_cli(namespace)
    if namespace.model_tag is None:
        return args
    if "model" in vars(namespace):
        raise ConfigError(f"the model was given twice: {namespace.model_tag!r} and --model {args.model!r}; drop one")
    return dataclasses.replace(args, model=namespace.model_tag)
