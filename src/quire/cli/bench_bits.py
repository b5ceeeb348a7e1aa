"""`quire bench bits`: which GEMMs have the same bits in any batch on this GPU, and what the fixed order costs."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve import YES, Flags, add_groups
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.ops.batch_invariance import Finding

DESCRIPTION = """\
Multiplies the same tokens in batches of 1 to 16,384 tokens, for the layer sizes of several models and for every weight format,
and lists the batch sizes whose bits differ, in the usual order of sums and in the fixed order of `--deterministic`. Takes some
minutes on a CUDA GPU."""
MAX_LISTED = 6  # listed batch sizes
BITS: Flags = (
    ("formats", "weight formats (default: all)", {"nargs": "+", "metavar": "NAME"}),
    ("models", "sizes of layers (default: all)", {"nargs": "+", "metavar": "NAME"}),
    ("times", "also measure the time of each product", YES),
    ("output-json", "write the result", {"metavar": "FILE", "type": Path}),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bits", usage="%(prog)s [options]", help="compare the bits of batches on a GPU", description=DESCRIPTION
    )
    add_groups(parser, [("bits", BITS)])
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"bits requires a CUDA device; torch {torch.__version__} sees none. Run it on the GPU to check")
    from quire.ops import batch_invariance, order

    formats = _chosen("formats", namespace.formats, list(batch_invariance.FORMATS))
    models = _chosen("models", namespace.models, list(batch_invariance.SHAPES))
    timed = batch_invariance.TIMED_ROWS if namespace.times else ()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n{'layer':<30}{'order':<8}batch sizes with other bits")
    found: list[dict[str, Any]] = []
    for fixed in (False, True):
        order.use_order(fixed)
        for case in batch_invariance.cases(formats, models):
            finding = batch_invariance.examine(case, timed=timed)
            found.append(_record(finding, fixed))
            print(_line(finding, fixed), flush=True)
    if namespace.output_json is not None:
        namespace.output_json.write_text(json.dumps(found, indent=1))
    return 0


def _chosen(flag: str, given: list[str] | None, known: list[str]) -> list[str]:
    for name in given or ():
        if name not in known:
            raise ConfigError(f"--{flag} must be one of {', '.join(known)}; got {name}")
    return given or known


def _record(finding: "Finding", fixed: bool) -> dict[str, Any]:
    case = finding.case
    return {
        "model": case.model, "layer": case.layer, "format": case.format, "fixed": fixed, "differing": finding.differing,
        "microseconds": finding.times_us,
    }  # fmt: skip


def _line(finding: "Finding", fixed: bool) -> str:
    listed = ", ".join(map(str, finding.differing[:MAX_LISTED])) or "none"
    if len(finding.differing) > MAX_LISTED:
        listed += f" and {len(finding.differing) - MAX_LISTED} more"
    times = "".join(f"  {count}: {us:.1f} us" for count, us in finding.times_us.items())
    return f"{finding.case.name:<30}{'fixed' if fixed else 'usual':<8}{listed}{times}"
