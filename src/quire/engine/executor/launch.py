"""Start ranks on other machines by their launcher: none, `--headless` commands, Ray, or the launcher of this rank."""

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from quire.config.args import EngineArgs, connect_timeout
from quire.config.devices import SHARE
from quire.device.registry import open_device
from quire.engine import handshake
from quire.engine.executor import nodes
from quire.engine.handshake import Terms, own_terms, terms_of
from quire.progress import doing
from quire.types.errors import ConfigError

AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # set if torchrun itself listens at MASTER_PORT
_turns: Iterator[int] = itertools.count()  # engines of this process that used the store


def find_nodes(args: EngineArgs, ranks: int) -> tuple[EngineArgs, nodes.Links | None]:
    """Return the arguments of ranks, and the links to other nodes, if there are any."""
    if args.distributed_executor_backend == "ray":
        from quire.engine.executor.ray_gpus import release_reservation, take_reservation
        from quire.engine.executor.ray_nodes import start_nodes

        reserved = take_reservation() if args.device == "cuda" else None
        release_reservation()
        links = start_nodes(args, ranks, reserved)
        return replace(args, nnodes=len(links.ranks)), links
    if args.distributed_executor_backend == "external_launcher":
        return args, read_launched_rank(os.environ, ranks).gather(connect_timeout(args), terms_of(args))
    if args.nnodes == 1:
        return args, None
    address = (args.master_addr, args.master_port)
    key, terms = handshake.cluster_key(), terms_of(args)
    with (
        handshake.listen(address, ("master_addr", "master_port")) as listener,
        doing(f"waiting for {args.nnodes - 1} other nodes at {address[0]}:{address[1]}"),
    ):
        return args, nodes.gather(listener, nodes.share_ranks(ranks, args.nnodes), key, connect_timeout(args), terms)


def take_launched_gpu(args: EngineArgs) -> None:
    """Select the GPU of a rank that an external launcher started. Called before the device is queried; imports torch."""
    if args.distributed_executor_backend != "external_launcher" or args.device not in ("auto", "cuda"):
        return
    import torch

    count = torch.cuda.device_count()  # does not initialize CUDA
    if count:
        _select_gpu(choose_gpu(os.environ, count))


def choose_gpu(environ: Mapping[str, str], count: int) -> int:
    """Return the index of a launched rank's GPU among `count` visible ones: LOCAL_RANK, or the only one.

    If ranks share the only one by mistake, they notice it when they connect (`device/cuda/group.py`).
    """
    if count == 1:
        return 0
    rank, local = environ.get("RANK", "?"), environ.get("LOCAL_RANK", "")
    if not local.isdecimal():
        raise ConfigError(
            f"rank {rank}: LOCAL_RANK must be the index of its GPU among the {count} of this machine, as torchrun sets it; got "
            f"{local!r}. Set it, or start each rank with one GPU in CUDA_VISIBLE_DEVICES"
        )
    if int(local) >= count and environ.get(SHARE) != "1":
        raise ConfigError(
            f"rank {rank}: LOCAL_RANK={local} requires {int(local) + 1} GPUs on this machine, and {count} are visible. Start "
            f"fewer ranks here, or make more visible (CUDA_VISIBLE_DEVICES). {SHARE}=1 lets ranks share a GPU, for tests"
        )
    return int(local) % count


@functools.cache  # a process has one GPU, however many engines it starts
def _select_gpu(index: int) -> None:
    import torch

    if index and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"the GPU of LOCAL_RANK {index} can no longer be selected: this process used CUDA before LLM(...). Create the LLM "
            "first, or start each rank with one GPU in CUDA_VISIBLE_DEVICES"
        )
    open_device("cuda").take_rank(index)


@dataclass(frozen=True)
class LaunchedRank:
    """A rank as its launcher describes it."""

    rank: int
    world: int
    address: handshake.Address
    agent: bool  # the launcher has the port and stores the port of rank 0

    def gather(self, seconds: float, terms: Terms) -> nodes.Links:
        """Wait for the other ranks, as rank 0."""
        shares = nodes.share_ranks(self.world, self.world)
        own = (self.address[0], 0) if self.agent else self.address
        names = ("MASTER_ADDR", "MASTER_PORT")
        with handshake.listen(own, names) as listener, doing(f"waiting for {self.world - 1} other ranks at {own[0]}"):
            if self.agent:
                self._store(seconds).set(f"quire/{next(_turns)}", str(listener.getsockname()[1]))
            remedy = "Here nodes are ranks: start the script with each RANK below WORLD_SIZE"
            return nodes.gather(listener, shares, handshake.cluster_key(), seconds, terms, remedy=remedy)

    def join(self, args: EngineArgs) -> nodes.Links:
        seconds, first = connect_timeout(args), self.address
        if self.agent:
            first = (first[0], int(self._store(seconds).get(f"quire/{next(_turns)}")))
        host = handshake.address_towards(first)
        return nodes.join(first, self.rank, host, handshake.cluster_key(), seconds, own_terms(args))

    def _store(self, seconds: float) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore(*self.address, is_master=False, timeout=timedelta(seconds=seconds))


def read_launched_rank(environ: Mapping[str, str], world: int) -> LaunchedRank:
    asked = "distributed_executor_backend=external_launcher"
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{asked}: every rank runs this script, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as "
            f"torchrun starts them; {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )
    try:
        rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        raise ConfigError(f"{asked}: RANK, WORLD_SIZE and MASTER_PORT must be numbers") from None
    if size != world or not 0 <= rank < size:
        raise ConfigError(
            f"{asked}: RANK {rank} of WORLD_SIZE {size}, but tensor_parallel_size times pipeline_parallel_size is {world}; "
            "they must be the same"
        )
    return LaunchedRank(rank, size, (environ["MASTER_ADDR"], port), environ.get(AGENT) == "True")
