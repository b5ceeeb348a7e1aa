"""What the measurements of a model in this process share: engine and report flags, the engine, and the saved result."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve import Flags
from quire.config.args import EngineArgs, add_cli_arguments

if TYPE_CHECKING:
    from quire.bench.offline import Figures
    from quire.llm import LLM

REPORT: Flags = (
    ("output-json", "write the result", {"metavar": "FILE", "type": Path}),
    ("compare", "print ratios to a saved result", {"metavar": "FILE", "type": Path}),
    ("metadata", "written into the result", {"metavar": "NAME=VALUE", "nargs": "+", "default": []}),
)
HIDDEN = ("run", "command", "measurement", "hf_token", "metadata")


def add_group(parser: argparse.ArgumentParser, title: str, flags: Flags) -> None:
    group = parser.add_argument_group(title)
    for name, text, options in flags:
        group.add_argument(f"--{name}", help=text, **options)


def add_report_and_engine_flags(parser: argparse.ArgumentParser) -> None:
    add_group(parser, "report", REPORT)
    add_cli_arguments(parser)


def at_least(flag: str, value: int, least: int) -> int:
    from quire.bench.record import MOST_TOKENS, check_count

    return check_count(flag, value, least, MOST_TOKENS)


def engine_args(namespace: argparse.Namespace, *, tokens_only: bool) -> EngineArgs:
    """Where all prompts are token ids, no tokenizer is loaded and nothing is detokenized, unless asked for."""
    args = EngineArgs.from_cli(namespace)
    if "disable_log_stats" not in vars(namespace):  # a benchmark reads no metrics
        args = dataclasses.replace(args, disable_log_stats=True)
    if tokens_only and args.tokenizer is None and "skip_tokenizer_init" not in vars(namespace):
        args = dataclasses.replace(args, skip_tokenizer_init=True)
    return args


class OfflineReport:
    """The report of one measurement. It is made before the model is loaded, so that wrong flags are reported early."""

    def __init__(self, kind: str, namespace: argparse.Namespace) -> None:
        from quire.bench.report import read_result
        from quire.cli.bench_serve import pairs

        self._kind, self._namespace = kind, namespace
        self._metadata = pairs(namespace.metadata, "--metadata")
        self._then = read_result(namespace.compare, kind) if namespace.compare else None

    def print_heading(self, title: str, model: str, engine: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        from quire.bench.report import heading

        device = machine.get("gpu") or f"{machine['cpu']}, {machine['cpu_count']} processors"
        print(
            heading(title, {"Model": model, "Device": device, **{name: engine[name] for name in ("dtype",) if name in engine}})
        )

    def close(
        self,
        model: str,
        engine: Mapping[str, Any],
        machine: Mapping[str, Any],
        figures: "Figures",
        details: Mapping[str, Any],
    ) -> None:
        """Compares and saves, where that was asked for."""
        from quire.bench.machine import provenance
        from quire.bench.report import comparison, save
        from quire.cli.bench_serve import plain

        flags = {name: plain(value) for name, value in vars(self._namespace).items() if name not in HIDDEN}
        result = {
            "kind": self._kind,
            **provenance(sys.argv),
            "model_id": model,
            "flags": flags,
            "engine": dict(engine),
            "machine": dict(machine),
            **self._metadata,
            **details,
            "figures": figures,
        }
        if self._then is not None:
            print(comparison(result, self._then, self._namespace.compare.name))
        if self._namespace.output_json is not None:
            save(result, self._namespace.output_json)
            print(f"saved: {self._namespace.output_json}")


def engine_facts(llm: "LLM") -> dict[str, Any]:
    """What the engine's flags came to."""
    config = llm.llm_engine.config
    return {
        "device": config.device,
        "dtype": config.dtype,
        "load_format": config.args.load_format,
        "max_model_len": llm.llm_engine.max_model_len,
        "max_num_seqs": config.max_seqs,
        "max_num_batched_tokens": config.max_batched_tokens,
        "block_size": config.page_size,
        "enable_prefix_caching": config.prefix_caching,
        "async_scheduling": config.depth > 0,
        "enforce_eager": config.args.enforce_eager,
        "executor": config.args.distributed_executor_backend or ("mp" if config.world > 1 else "uni"),
    }
