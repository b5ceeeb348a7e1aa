"""`quire bench`: measurements. Each is a file `bench_NAME.py` with `add_parser(subparsers)` and `run(namespace) -> int`."""

import importlib
from typing import Any

MEASUREMENTS = ("serve", "throughput", "latency", "startup", "steps")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench", help="measure a server or a model", description="Measures throughput, latency and start-up."
    )
    inner = parser.add_subparsers(title="measurements", dest="measurement", metavar="MEASUREMENT", required=True)
    for name in MEASUREMENTS:
        importlib.import_module(f"quire.cli.bench_{name}").add_parser(inner)
