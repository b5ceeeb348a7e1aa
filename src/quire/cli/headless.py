"""`quire serve --headless`: a machine that has ranks of an engine which another machine serves.

It starts its ranks whenever the engine there is started, which is more than once if something is lost, and ends with it.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from typing import NoReturn

from quire.config.args import EngineArgs
from quire.engine.executor import nodes
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.cli.headless")
PAUSE = 0.2  # seconds between two lives of the engine


def run_headless(args: EngineArgs) -> int:
    if args.nnodes < 2 or not 0 < args.node_rank < args.nnodes:
        raise ConfigError(
            f"--headless is for machines 1 to nnodes - 1: give --nnodes and --node-rank; got {args.nnodes} and {args.node_rank}"
        )
    if args.distributed_executor_backend not in (None, "auto", "mp"):
        raise ConfigError(
            f"--headless starts processes; distributed_executor_backend={args.distributed_executor_backend} does not"
        )
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("quire").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _stop)
    first = (args.master_addr, args.master_port)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            logger.info("node %d of %d: waiting for machine 0 at %s:%d", args.node_rank, args.nnodes, *first)
            links = nodes.join(first, args.node_rank, nodes.address_towards(first), _key(), args.engine_start_timeout)
            logger.info("node %d has ranks %d to %d", args.node_rank, links.own.start, links.own.stop - 1)
            ranks = nodes.NodeRanks(links)
            try:
                if ranks.watch():
                    return 0
            finally:
                ranks.end()
            logger.warning("the engine was lost: its ranks here are ended, and begin again with the next one")
            time.sleep(PAUSE)
    return 0


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _key() -> str:
    return os.environ.get(nodes.KEY, "")
