"""`quire run-batch`: answer the requests of a JSONL file in OpenAI's batch format."""

import argparse
import copy
import dataclasses
import sys
from typing import Any

from quire.cli.parser import add_model_tag, engine_args
from quire.config.args import add_cli_arguments
from quire.config.fields import spec_of
from quire.config.flags import add_flags
from quire.config.resolve import check_model
from quire.config.server_args import SERVER_NAMES, ServerArgs
from quire.types.errors import ConfigError

LINES_FAILED = 3
# sections of the server's flags, and single ones, that a batch has
_SECTIONS = ("tools and reasoning", "LoRA adapters (with --enable-lora)")
_FLAGS = (
    "trust_request_chat_template", "accept_any_model_name", "response_role", "return_tokens_as_token_ids",
    "enable_prompt_tokens_details", "enable_per_request_metrics",
)  # fmt: skip
_NOT = ("allow_runtime_lora_updating", "allowed_lora_path")
EPILOG = (
    "exit codes: 0 all lines were answered, 3 the run is complete and some lines failed, 1 the run ended early (--resume "
    "goes on), 2 wrong use, 130 Ctrl-C (--resume goes on)"
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run-batch",
        usage="%(prog)s [MODEL] -i FILE -o FILE [options]",
        help="answer the requests of a file in OpenAI's batch format",
        description="Answers every line of a JSONL file in OpenAI's batch format, through the routes of the server. A line "
        "that fails has its error in the output; the others are answered. Answers are in the order in which they are done.",
        epilog=EPILOG,
    )
    add_model_tag(parser)
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", metavar="FILE", help="the requests: a JSONL file or an http(s) URL")
    group.add_argument(
        "-o", "--output-file", metavar="FILE", help="for the answers: a file or an http(s) URL, which gets a PUT"
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with an output file: lines whose custom_id it has are not run again"
    )
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="lines in flight (default: twice max_num_seqs for each engine)"
    )
    group.add_argument("--output-tmp-dir", metavar="DIR", help="folder for the output until it is sent to a URL")
    add_flags(parser, _served(), "server")
    add_cli_arguments(parser, taken=SERVER_NAMES)
    parser.set_defaults(run=run)


def _served() -> type:
    """Return a dataclass of the server's arguments that a batch has."""
    chosen = [
        field for field in dataclasses.fields(ServerArgs)
        if field.name in _FLAGS or (spec_of(field).group in _SECTIONS and field.name not in _NOT)
    ]  # fmt: skip
    return dataclasses.make_dataclass("BatchServerArgs", [(field.name, field.type, copy.copy(field)) for field in chosen])


def run(namespace: argparse.Namespace) -> int:
    for flag in ("input_file", "output_file"):
        if not getattr(namespace, flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} is missing: quire run-batch MODEL -i requests.jsonl -o answers.jsonl"
            )
    if namespace.concurrency is not None and namespace.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1; got {namespace.concurrency}")
    settings = ServerArgs.take_from(namespace)
    args = engine_args(namespace)
    check_model(args)
    try:
        from quire.serve.batches.offline import BatchFiles, run_offline
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "quire":
            raise
        raise ConfigError(f"run-batch needs the extra serve: pip install 'quire[serve]' ({error.name} is missing)") from None
    if "disable_log_stats" not in vars(namespace):
        args = dataclasses.replace(args, disable_log_stats=True)
    files = BatchFiles(namespace.input_file, namespace.output_file, namespace.resume, namespace.output_tmp_dir)
    counts = run_offline(args, settings, files, namespace.concurrency)
    skipped = f" ({counts.skipped} of them by earlier runs)" if counts.skipped else ""
    done = counts.completed + counts.failed
    print(f"{done} lines{skipped}: {counts.completed} answered, {counts.failed} failed", file=sys.stderr)
    return LINES_FAILED if counts.failed else 0
