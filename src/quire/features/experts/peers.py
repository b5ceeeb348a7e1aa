"""Connections between engines that share experts (`enable_expert_parallel` with `data_parallel_size`). Never imports torch.

    a generation    one shared memory, and one socket pair for every two ranks of all engines
    an engine       takes the descriptors of its ranks once, and passes them to its ranks (`exchange.py` uses them)

When an engine is lost, the others find their sockets closed and end too; all of them restart with the next generation.
"""

import contextlib
import itertools
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from quire.config.args import EngineArgs, shares_experts
from quire.proc.spawn import anonymous_memory
from quire.types.errors import ExpertPeerLost

if TYPE_CHECKING:
    from quire.engine.executor.workers import Workers

OPTION = "experts="  # in the arguments of an engine's process, or of a rank's
POLL_S = 0.2  # while an engine starts


@dataclass(frozen=True)
class PeerLinks:
    """Descriptors of some ranks: the shared memory, and a socket to each other rank. Ranks are numbered across engines."""

    memory: int
    links: tuple[tuple[int, int, int], ...]  # rank, other rank, descriptor of the socket between them

    @property
    def descriptors(self) -> list[int]:
        return [self.memory, *(descriptor for _, _, descriptor in self.links)]

    @property
    def first(self) -> int:
        """Return the lowest rank."""
        return min(rank for rank, _, _ in self.links)

    def of(self, rank: int) -> "PeerLinks":
        return PeerLinks(self.memory, tuple(link for link in self.links if link[0] == rank))

    def as_option(self, names: Sequence[object] | None = None) -> str:
        """Return an argument for a child process. names: written in place of the descriptors"""
        memory, *others = self.descriptors if names is None else names
        links = [f"{rank}-{other}-{name}" for (rank, other, _), name in zip(self.links, others, strict=True)]
        return f"{OPTION}{memory},{','.join(links)}"

    def sockets(self) -> dict[int, socket.socket]:
        """Return the sockets to the other ranks. All links must be of one rank."""
        return {other: socket.socket(fileno=descriptor) for _, other, descriptor in self.links}

    def close(self, ranks: Iterable[int] | None = None) -> None:
        """Close the sockets of these ranks; None: all sockets and the memory."""
        some = None if ranks is None else set(ranks)
        for rank, _, descriptor in self.links:
            if some is None or rank in some:
                os.close(descriptor)
        if some is None:
            os.close(self.memory)


def read_links(options: Iterable[str]) -> PeerLinks | None:
    """Return the links that the arguments of this process name; None: there are none."""
    for option in options:
        if option.startswith(OPTION):
            memory, *parts = option.removeprefix(OPTION).split(",")
            paths = [tuple(map(int, part.split("-"))) for part in parts]
            links = PeerLinks(int(memory), tuple((rank, other, descriptor) for rank, other, descriptor in paths))
            for descriptor in links.descriptors:
                os.set_inheritable(descriptor, False)
            return links
    return None


class ExpertPeers:
    """The links of the current generation, in the process that starts the engines."""

    def __init__(self, engines: int, ranks: int) -> None:
        """ranks: number of ranks per engine"""
        self._engines, self._ranks = engines, ranks
        self._left: dict[int, PeerLinks] = {}  # engine -> its links, until it takes them

    def take(self, engine: int) -> PeerLinks:
        """Return the links of an engine. The caller closes them when the engine's process has them."""
        if engine not in self._left:
            self.close()
            self._left = self._make()
        return self._left.pop(engine)

    def close(self) -> None:
        while self._left:
            self._left.popitem()[1].close()

    def _make(self) -> dict[int, PeerLinks]:
        links: list[list[tuple[int, int, int]]] = [[] for _ in range(self._engines)]
        with contextlib.ExitStack() as undone:
            memory = anonymous_memory("quire-experts")
            undone.callback(os.close, memory)
            for first, second in itertools.combinations(range(self._engines * self._ranks), 2):
                for one, other, end in zip((first, second), (second, first), socket.socketpair(), strict=True):
                    links[one // self._ranks].append((one, other, end.detach()))
                    undone.callback(os.close, links[one // self._ranks][-1][2])
            memories = [memory, *(os.dup(memory) for _ in links[1:])]
            undone.pop_all()
        return {engine: PeerLinks(memories[engine], tuple(own)) for engine, own in enumerate(links)}


@contextlib.contextmanager
def watch_peers(links: PeerLinks | None, lost: Callable[[], object]) -> Iterator[None]:
    """Call `lost` if another engine ends while this one starts. A thread polls the sockets: nothing else reads them yet."""
    if links is None:
        yield
        return
    own = {rank for rank, _, _ in links.links}
    outward = [each for rank, other, each in links.links if rank == links.first and other not in own]
    copies = [os.dup(each) for each in outward]  # the originals are closed when the ranks have them
    over = threading.Event()

    def poll() -> None:
        waiting = select.poll()
        for copy in copies:
            waiting.register(copy, 0)  # closed by the other end, even if data is left to read
        while not (found := waiting.poll(1000 * POLL_S)) and not over.is_set():
            pass
        for copy in copies:
            os.close(copy)
        if found and not over.is_set():
            lost()

    threading.Thread(target=poll, name="quire-expert-peers", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def expert_peers_of(args: EngineArgs) -> ExpertPeers | None:
    return ExpertPeers(args.data_parallel_size, args.tensor_parallel_size) if shares_experts(args) else None


class ExpertPeerWatch:
    """Liveness of the ranks and engines that an engine's first rank shares experts with."""

    def __init__(self, workers: "Workers | None", engine: int, ranks: int, start_timeout: float, hang_timeout: float) -> None:
        self._workers, self._engine, self._ranks = workers, engine, ranks
        self._start_timeout, self._hang_timeout = start_timeout, hang_timeout
        self.connected = False  # all peers have answered once

    def lost(self, rank: int) -> NoReturn:
        if rank // self._ranks == self._engine and self._workers is not None:
            self._workers.lost(rank % self._ranks)
        self._check_own()
        raise ExpertPeerLost(f"engine {rank // self._ranks}, which has some of its experts, is gone")

    def late(self, ranks: Sequence[int], seconds: float) -> None:
        if self._workers is not None:
            self._workers.refuse_stopped(seconds)
        self._check_own()
        if seconds > (self._hang_timeout if self.connected else self._start_timeout):
            names = " and ".join(f"engine {engine}" for engine in sorted({rank // self._ranks for rank in ranks}))
            raise ExpertPeerLost(f"{names} kept those that share its experts waiting for {seconds:.1f} s")

    def _check_own(self) -> None:
        if self._workers is not None:
            self._workers.check()
