"""`quire serve --headless`: run ranks of an engine that another machine serves, or whole engines, without an API.

The ranks are started whenever machine 0 starts the engine, again after a failure, and end with it.
"""

import contextlib
import dataclasses
import logging
import signal
import time
from typing import NoReturn

from quire.config.args import EngineArgs, connect_timeout
from quire.engine import handshake
from quire.engine.executor import nodes
from quire.engine.handshake import own_terms
from quire.engine.node_agent import NodeAgent
from quire.proc.logs import set_up_child
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.cli.headless")
REJOIN_DELAY_S = 0.2  # after the engine was lost


def run_headless(args: EngineArgs) -> int:
    if args.data_parallel_size > 1:
        return _run_engines(args)
    if args.nnodes < 2 or not 0 < args.node_rank < args.nnodes:
        raise ConfigError(
            f"--headless is for machines 1 to nnodes - 1: give --nnodes and --node-rank; got {args.nnodes} and {args.node_rank}"
            "; or for the engines of data_parallel_size from --data-parallel-start-rank on"
        )
    if args.distributed_executor_backend not in (None, "auto", "mp"):
        raise ConfigError(
            f"--headless starts processes; distributed_executor_backend={args.distributed_executor_backend} does not"
        )
    _prepare()
    first = (args.master_addr, args.master_port)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            logger.info("node %d of %d: waiting for machine 0 at %s:%d", args.node_rank, args.nnodes, *first)
            host, key = handshake.address_towards(first), handshake.cluster_key()
            links = nodes.join(first, args.node_rank, host, key, connect_timeout(args), own_terms(args))
            logger.info("node %d has ranks %d to %d", args.node_rank, links.own.start, links.own.stop - 1)
            ranks = nodes.NodeRanks(links)
            try:
                if ranks.watch():
                    return 0
            finally:
                ranks.end()
            logger.warning(
                "node %d lost machine 0 at %s:%d or a rank of its engine: ranks %d to %d are stopped; joining again",
                args.node_rank, *first, links.own.start, links.own.stop - 1,
            )  # fmt: skip
            time.sleep(REJOIN_DELAY_S)
    return 0


def _run_engines(args: EngineArgs) -> int:
    first, here = args.data_parallel_start_rank, args.data_parallel_size_local
    last = first + (args.data_parallel_size - first if here is None else here) - 1
    if not 0 < first <= last < args.data_parallel_size:
        raise ConfigError(
            f"--headless with data_parallel_size={args.data_parallel_size}: machine 0 runs the first engines, this one others. "
            "Give the number of the first, --data-parallel-start-rank, and how many it runs, "
            f"--data-parallel-size-local; got {first} and {here}"
        )
    if args.nnodes > 1 or args.distributed_executor_backend in ("ray", "external_launcher"):
        raise ConfigError("--headless with data_parallel_size starts whole engines: drop nnodes, ray and external_launcher")
    if args.data_parallel_backend == "ray":
        raise ConfigError(
            "--headless is not supported with data_parallel_backend=ray, which starts all engines from machine 0. Start a "
            "Ray node on this machine instead: ray start"
        )
    if args.warm_restart is None:
        args = dataclasses.replace(args, warm_restart=True)
    _prepare()
    with contextlib.suppress(KeyboardInterrupt):
        NodeAgent(args, first, last - first + 1).run()
    return 0


def _prepare() -> None:
    set_up_child(logging.Formatter("%(levelname)s %(name)s: %(message)s"), logging.INFO)
    signal.signal(signal.SIGTERM, _stop)


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt
