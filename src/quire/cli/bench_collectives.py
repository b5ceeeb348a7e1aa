"""`quire bench collectives`: how long ranks take to exchange messages, and whether they all get the right bits."""

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve import Flags, add_groups
from quire.cli.tiny_model import LONGEST, write_tiny_model
from quire.config.args import EngineArgs, add_cli_arguments
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm import LLM

DESCRIPTION = """\
Starts the ranks of -tp and -pp with a tiny random model, as `quire serve` would, and lets every group of tensor-parallel ranks
exchange messages of several sizes. Prints the time of each collective, and whether its result has the bits of the same sums in
one process on every rank. On several machines run it on each with its --node-rank. Exit code 1: a result was wrong."""
SIZES = ("4K", "64K", "512K", "1M", "16M")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MAX_BYTES = 1 << 30
COLLECTIVES: Flags = (
    ("sizes", f"bytes of messages, with K, M or G (default {' '.join(SIZES)})", {"nargs": "+", "metavar": "N"}),
    ("output-json", "write the result", {"metavar": "FILE", "type": Path}),
)
# of the engine: little memory, and nothing that the measurement does not need
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "disable_log_stats": True, "max_model_len": LONGEST, "max_num_seqs": 8, "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 27,
}  # fmt: skip
Finding = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "collectives", usage="%(prog)s [options]", help="measure how ranks exchange messages", description=DESCRIPTION
    )
    add_groups(parser, [("collectives", COLLECTIVES)])
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    sizes = [bytes_of(text) for text in namespace.sizes or SIZES]
    args = EngineArgs.from_cli(namespace)
    check_ranks(args)
    with tiny_engine_args(args, vars(namespace)) as args:
        if args.node_rank:
            return join_machine(args)
        with started(args) as llm:
            findings = measure(llm, sizes)
    print_findings(findings)
    if namespace.output_json is not None:
        namespace.output_json.write_text(json.dumps(findings, indent=1))
    return 0 if all(each["right"] for each in findings) else 1


def bytes_of(text: str) -> int:
    number, unit = text.rstrip("KMGkmg"), text.lstrip("0123456789").upper()
    if not number.isdigit() or unit not in UNITS or not 0 < int(number) * UNITS[unit] <= MAX_BYTES:
        raise ConfigError(f"--sizes are numbers of bytes from 1 to 1G, such as 4096, 64K or 1M; got {text}")
    return int(number) * UNITS[unit]


def check_ranks(args: EngineArgs) -> None:
    if args.data_parallel_size > 1:
        raise ConfigError("engines of --data-parallel-size have no collectives to measure; leave it out")
    if args.tensor_parallel_size < 2:
        raise ConfigError("collectives are of tensor-parallel ranks; give --tensor-parallel-size of at least 2")


@contextlib.contextmanager
def tiny_engine_args(args: EngineArgs, given: Mapping[str, Any]) -> Iterator[EngineArgs]:
    """Return the arguments with a tiny model, unless the user names one, and with `ENGINE` where the user gave nothing."""
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        values = {name: value for name, value in ENGINE.items() if name not in given}
        if "model" not in given:
            values["model"] = write_tiny_model(Path(directory), args.tensor_parallel_size, args.pipeline_parallel_size)
        yield dataclasses.replace(args, **values)


def join_machine(args: EngineArgs) -> int:
    """Run the ranks of a machine other than the first until it has finished."""
    from quire.cli.headless import run_headless

    return run_headless(args)


@contextlib.contextmanager
def started(args: EngineArgs) -> "Iterator[LLM]":
    from quire.llm import LLM

    with LLM.from_engine_args(args) as llm:
        yield llm


def measure(llm: "LLM", sizes: Sequence[int]) -> list[Finding]:
    """Return one finding for each collective and size: the median of ranks; right: every rank has the right bits."""
    ranks = [found for found in llm.llm_engine.call_all("measure_collectives", list(sizes)) if found]
    return [
        {
            "collective": row[0]["collective"], "bytes": row[0]["bytes"],
            "microseconds": statistics.median(each["microseconds"] for each in row),
            "right": all(each["right"] for each in row) and len({each["digest"] for each in row}) == 1,
        }
        for row in zip(*ranks, strict=True)
    ]  # fmt: skip


def print_findings(findings: Sequence[Finding]) -> None:
    print(f"{'collective':<12}{'bytes':>12}{'us':>12}{'GB/s':>8}  bits")
    for each in findings:
        rate = each["bytes"] / each["microseconds"] / 1e3
        bits = "right" if each["right"] else "WRONG"
        print(f"{each['collective']:<12}{each['bytes']:>12,}{each['microseconds']:>12,.1f}{rate:>8.2f}  {bits}")
