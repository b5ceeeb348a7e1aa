"""Collectives of ranks that have a GPU each, on this node or on several: NCCL moves the parts, each rank adds in rank order.

    all-reduce    all-to-all: rank r receives share r of all parts ─► r adds them in rank order ─► all-gather of the shares
    all-gather    parts of one length, padded

Both move as many bytes as a ring. NCCL's own all-reduce would add in an order that depends on the message and the topology.

The process group belongs to this object. torch.distributed's default group is never used: a program may hold two engines, or
use torch.distributed itself.

All connections are made here, before memory is measured and before a CUDA graph records a collective. NCCL connects the ranks
of an all-to-all once, with all channels and for any size. For an all-gather it chooses an algorithm by size, and connects each
at its first use: so all-gathers of many sizes run here (`WARM_UP_BYTES`).

Connecting waits for all ranks, in calls that have no time limit and that nothing ends. So it runs in a thread, while the caller
checks that the other ranks are alive and not late (`run_watched`).

torch watches process groups of NCCL, and by default ends the whole process after an error or a timeout. That is turned off for
this group (`WATCHDOG`): the engine notices lost ranks itself, names them, and may belong to a program with other work.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from quire.device.cuda.links import INTERFACES, check_variables
from quire.dist.mesh import Position
from quire.dist.shared_memory import PeerWatch, SharedMemoryGroup
from quire.types.errors import EngineDead, EngineError, QuireError

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)  # of torch's watchdog, which only logs; the engine notices lost ranks much earlier
STORE_TIMEOUT = timedelta(minutes=5)
ABORT_TIMEOUT_S = 10.0
CHECK_INTERVAL_S = 0.2  # between checks of the other ranks while NCCL connects
CAUSE_TIMEOUT_S = 1.0  # after an error of NCCL, for another rank to end: then that is the cause
WARM_UP_BYTES = tuple(1 << power for power in range(10, 27, 2))  # of all-gathers: 1 KiB to 64 MiB of all ranks together
LOOPBACK = "127.0.0.1"
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # log errors of NCCL, do not end the process
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the same for errors of CUDA, which the engine reports
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # do not end the process if the watchdog is slow
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # do not poll the store, which ends with rank 0
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # do not hold the group's lock for a minute after an error
}  # environment variables that a process group reads when it is made
Everyone = Callable[[bytes], Sequence[bytes]]  # a short message of this rank -> those of all ranks
Check = Callable[[float], None]  # called with seconds of waiting; raises if another rank is lost, or late for that long


class NCCL:
    def __init__(self, position: Position, everyone: Everyone, host: str, device: torch.device, check: Check) -> None:
        """Connect all ranks, which call this at the same time.

        host: the address of rank 0 that all ranks reach.
        check: raises EngineDead if a rank is late, and an error of any kind if one is lost.
        """
        self._rank, self._size = position.rank, position.size
        self._aborting: threading.Thread | None = None
        try:
            run_watched(partial(self._connect, open_store(position, everyone, host), position, device), check)
            everyone(b"")
        except QuireError:  # a rank was lost
            raise
        except RuntimeError as error:
            deadline = time.monotonic() + CAUSE_TIMEOUT_S
            while time.monotonic() < deadline:
                check(0.0)
                time.sleep(0.05)
            reason = str(error).strip().partition("\n")[0]
            raise EngineError(f"NCCL cannot connect rank {position.rank} to the others: {reason}. {remedy()}") from error

    def _connect(self, store: Callable[[], Any], position: Position, device: torch.device) -> None:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._store = store()
            self._ranks: Any = make_nccl(self._store, position)
            self.add(torch.zeros(self._size, dtype=torch.bfloat16, device=device))
            for size in WARM_UP_BYTES:
                self.gather(torch.zeros(-(-size // self._size), dtype=torch.uint8, device=device))
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which is a new tensor."""
        flat, size = part.reshape(-1), self._size
        share = -(-len(flat) // size)
        if share * size != len(flat):
            padded = flat.new_zeros(share * size)
            padded[: len(flat)] = flat
            flat = padded
        received = torch.empty_like(flat).view(size, share)
        self._refuse_aborted()
        self._ranks.alltoall_base(received.view(-1), flat, [], []).wait()
        total = received[0]
        for other in received[1:]:
            total += other
        return self.gather(total).view(-1)[: part.numel()].view(part.shape)

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts [ranks, length]; part: contiguous, [length]."""
        gathered = part.new_empty(self._size, len(part))
        self._refuse_aborted()
        self._ranks._allgather_base(gathered.view(-1), part).wait()
        return gathered

    def _refuse_aborted(self) -> None:
        """Raise EngineError after `abort`, which holds a lock that torch's collectives wait for until all graphs are freed."""
        if self._aborting is not None:
            raise EngineError("NCCL was aborted, because a rank was lost")

    def abort(self) -> None:
        """Begin to end collectives in progress, also those that wait for a lost rank. Kernels end at once; the call of NCCL
        returns when no CUDA graph with its collectives exists any more.
        """
        if self._aborting is None:
            self._aborting = threading.Thread(target=self._ranks.abort, name="quire-nccl-abort", daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """Free NCCL's memory. No CUDA graph with its collectives may exist."""
        self.abort()
        assert self._aborting is not None
        self._aborting.join(ABORT_TIMEOUT_S)
        if self._aborting.is_alive():
            logger.warning("NCCL was not closed within %.0f s; it keeps GPU memory until this process ends", ABORT_TIMEOUT_S)
        self._ranks = self._store = None


def run_watched(work: Callable[[], None], check: Check) -> None:
    """Run `work` in a thread, and call `check` until it ends. If `check` raises, the thread is left behind."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread, began = threading.Thread(target=run, name="quire-nccl-connect", daemon=True), time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(CHECK_INTERVAL_S)
        if thread.is_alive():
            check(time.monotonic() - began)
    if errors:
        raise errors[0]


def connect_check(group: SharedMemoryGroup, watch: PeerWatch) -> Check:
    """Return a check of the ranks of a group while they connect."""

    def check(seconds: float) -> None:
        absent = group.absent()  # raises if one is lost
        try:
            watch.late(absent or group.others, seconds)
        except EngineDead as error:
            raise EngineDead(f"NCCL has not connected the ranks: {error}. {remedy()}") from error

    return check


def remedy() -> str:
    value = os.environ.get(INTERFACES)
    own = {} if value is None else {INTERFACES: value}
    wrong = [f"{remark.text}. " for remark in check_variables(own, [name for _, name in socket.if_nameindex()])]
    shown = "not set" if value is None else value
    return (
        f"{''.join(wrong)}Set {INTERFACES} ({shown} here) to an interface by which all machines of the ranks reach each other, "
        "or NCCL_DEBUG=INFO to see what failed"
    )


def open_store(position: Position, everyone: Everyone, host: str) -> Callable[[], Any]:
    """Return what opens the store through which NCCL connects ranks. Rank 0 has it, on any free port."""
    make = cast(Any, dist).TCPStore
    if position.rank == 0:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        store = make(
            host, port, position.size, True, timeout=STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        everyone(f"{host} {port}".encode())
        return lambda: store
    address, port = everyone(b"")[0].decode().rsplit(" ", 1)
    return partial(make, address, int(port), position.size, False, timeout=STORE_TIMEOUT)


def make_nccl(store: Any, position: Position) -> Any:
    kind = cast(Any, dist).ProcessGroupNCCL
    options = kind.Options()
    options._timeout = TIMEOUT
    options.global_ranks_in_group = list(range(position.size))
    options.group_name = "quire"
    with default_variables(WATCHDOG):
        return kind(store, position.rank, position.size, options)


@contextlib.contextmanager
def default_variables(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that the user did not set, within the block."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
