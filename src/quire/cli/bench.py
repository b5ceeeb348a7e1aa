"""`quire bench`: measurements of a server or a model, each with its own parser and `run(namespace) -> int`."""

from typing import Any


def add_parser(subparsers: Any) -> None:
    from quire.cli import bench_bits, bench_collectives, bench_offline, bench_serve, bench_steps

    parser = subparsers.add_parser(
        "bench", help="measure a server or a model", description="Measures throughput, latency and start-up."
    )
    inner = parser.add_subparsers(title="measurements", dest="measurement", metavar="MEASUREMENT", required=True)
    bench_serve.add_parser(inner)
    bench_offline.add_throughput_parser(inner)
    bench_offline.add_latency_parser(inner)
    bench_offline.add_startup_parser(inner)
    bench_steps.add_parser(inner)
    bench_bits.add_parser(inner)
    bench_collectives.add_parser(inner)
