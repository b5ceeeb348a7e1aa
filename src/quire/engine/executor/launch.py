"""Who starts ranks on other nodes, and the links to them: nobody, people with `--headless`, or Ray."""

import os
from dataclasses import replace

from quire.config.args import EngineArgs
from quire.engine.executor import nodes
from quire.progress import doing


def find_nodes(args: EngineArgs, ranks: int) -> tuple[EngineArgs, nodes.Links | None]:
    """What ranks are told, and the links to those of other nodes if there are any."""
    if args.distributed_executor_backend == "ray":
        from quire.engine.executor.ray_nodes import start_nodes

        links = start_nodes(ranks, args.nnodes, args.engine_start_timeout)
        return replace(args, nnodes=1 if links is None else len(links.ranks)), links
    if args.nnodes == 1:
        return args, None
    address = (args.master_addr, args.master_port)
    key = os.environ.get(nodes.KEY, "")
    with nodes.listen(address) as listener, doing(f"waiting for {args.nnodes - 1} other nodes at {address[0]}:{address[1]}"):
        return args, nodes.gather(listener, nodes.share_ranks(ranks, args.nnodes), key, args.engine_start_timeout)
