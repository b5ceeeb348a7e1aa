"""`quire serve MODEL`: the OpenAI-compatible server."""

import argparse
import dataclasses
import os
from typing import Any

from quire.cli.parser import add_model_tag, engine_args
from quire.config.args import add_cli_arguments, local_engines
from quire.config.resolve import check_model
from quire.config.server_args import SERVER_NAMES, ServerArgs, add_server_arguments
from quire.engine.timeline import process_start
from quire.types.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        usage="%(prog)s [MODEL] [options]",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serves a model over HTTP with OpenAI's API. SIGTERM or Ctrl-C lets running requests finish first.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_tag(parser)
    add_server_arguments(parser)
    add_cli_arguments(parser, taken=SERVER_NAMES)


def run(namespace: argparse.Namespace) -> int:
    settings = ServerArgs.take_from(namespace)
    settings.export_logging(os.environ)
    args = engine_args(namespace)
    if settings.headless:
        from quire.cli.headless import run_headless

        return run_headless(args)
    check_model(args)
    if args.warm_restart is None:
        args = dataclasses.replace(args, warm_restart=True)
    try:
        from quire.engine.child import engine_fork_server, forks_engines

        fork_server = engine_fork_server()
        if forks_engines(args) and local_engines(args):
            fork_server.prepare()  # it imports the engines' libraries while this process imports its own
        from quire.serve.launch import run_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "quire":
            raise
        raise ConfigError(f"the server needs the extra serve: pip install 'quire[serve]' ({error.name} is missing)") from None
    return run_server(args, settings, process_start(), fork_server)
