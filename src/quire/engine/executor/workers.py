"""The processes of all ranks but the first, as the first one has them. Importing this does not import torch.

    first rank ──── StartRank, CallRank, RunStep ────► a rank          one connection each; BeginStep, FinishStep in a
                                                                       pipeline
    first rank ◄─── Answer, RankFailed ────────────── a rank
    any rank   ◄─── a byte for every turn ──────────► any other        `dist/shared_memory.py`

A rank ends with this process in any case: by a signal of the system, and by the end of its connections.
"""

import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, NoReturn

import msgspec

from quire.engine import ipc
from quire.engine.executor import wire
from quire.engine.executor.nodes import Links, NodeConnection, RemoteProcess, spawn_rank
from quire.features.experts.peers import PeerLinks
from quire.proc.channel import MAX_FRAME_BYTES, Frames, FrameTooLong
from quire.proc.fork_server import usable_parent_server
from quire.proc.spawn import ChildProcess, anonymous_memory, command_of, exit_reason, is_stopped
from quire.types.adapter import AdapterRef
from quire.types.errors import EngineDead, ExpertPeerLost, QuireError

logger = logging.getLogger(__name__)
COMMAND = command_of("quire.engine.executor.worker")
LOST = 3  # the exit code of a rank that ends because another one is gone
POLL_S = 0.5  # between checks of late ranks
STOPPED_TIMEOUT_S = 0.5  # that a stopped process (SIGSTOP) may delay the others
FAILURE_TIMEOUT_S = 1.0  # for the cause of a loss to be reported
SHARED_FAILURE_TIMEOUT_S = 0.2  # the same, if a rank may end because another engine did
MAX_REMOTE_ANSWER_BYTES = 1 << 26  # of a rank on another node
END_TIMEOUT_S = 10.0  # for a killed process to end
SEND_TIMEOUT_S = 30.0  # for a message to be accepted: a rank reads whenever it waits


@dataclass(frozen=True)
class RankTimeouts:
    """The time limits of ranks."""

    start_by: float  # by the monotonic clock: when all must have allocated their cache
    hang: float  # seconds that one may delay the others in a step


class Worker:
    """One rank."""

    def __init__(
        self,
        rank: int,
        process: "ChildProcess | RemoteProcess",
        connection: socket.socket,
        stage: int | None = None,
    ) -> None:
        """stage: its pipeline stage, if there are several."""
        self.rank, self.process, self._stage = rank, process, stage
        self._polling = Lock()
        self._sending = Lock()  # another thread sends `ReadAdapter`
        self.failure: wire.RankFailed | None = None
        self.answers: list[Any] = []
        self.closed = False  # its connection
        most = MAX_REMOTE_ANSWER_BYTES if isinstance(process, RemoteProcess) else MAX_FRAME_BYTES
        self.socket, self._frames = connection, Frames(connection, most)
        connection.settimeout(SEND_TIMEOUT_S)

    @property
    def name(self) -> str:
        stage = "" if self._stage is None else f"stage {self._stage}, "
        if isinstance(self.process, RemoteProcess):
            return f"rank {self.rank} ({stage}on node {self.process.connection.node})"
        return f"rank {self.rank} ({stage}process {self.process.pid})"

    def poll(self) -> int | None:
        """Return the exit code of its process; None: it runs. Called in any thread."""
        with self._polling:
            return self.process.poll()

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises OSError if the rank does not read or is gone."""
        with self._sending:
            self._frames.send(frame)

    def receive(self) -> None:
        """Receive its messages."""
        while not self.closed and _wait([self], 0.0):
            try:
                self.closed = not self._frames.receive()
            except OSError:
                self.closed = True
        while (report := self._next()) is not None:
            match report:
                case wire.Answer(value):
                    self.answers.append(value)
                case wire.RankFailed() as failure:
                    self.failure = failure

    def _next(self) -> wire.Report | None:
        try:
            frame = self._frames.next()
            return None if frame is None else wire.decode_report(frame)
        except (FrameTooLong, msgspec.MsgspecError) as error:  # the peer is no rank
            self.closed = True
            self.failure = wire.RankFailed("EngineError", str(error), None)
            return None


class Workers:
    """All other ranks. `memory` and `peers` are the first rank's own ends of the connections between ranks."""

    def __init__(
        self,
        start: wire.StartRank,
        size: int,
        timeouts: "RankTimeouts",
        links: Links | None = None,
        expert_peers: PeerLinks | None = None,
    ) -> None:
        """Start the ranks.

        start: the message to rank 0, if there were one. `gpus` is for ranks of this node, `draft_files` for those of others.
        links: to ranks on other nodes, which are started there.
        expert_peers: of all ranks, to engines that share their experts.
        """
        args = start.args
        links = links or Links([range(size)])
        self._timeouts, self._shares = timeouts, expert_peers is not None
        self._starts = True
        self._dead: EngineDead | None = None  # why
        workers: list[Worker] = []
        self._workers: Sequence[Worker] = workers
        with contextlib.ExitStack() as handed:
            self.memory = anonymous_memory("quire-ranks")
            ends: list[dict[int, socket.socket]] = [{} for _ in links.own]
            self.peers, self.remote = ends[0], links.ends.get(0, {})
            self.end = weakref.finalize(self, _end, os.getpid(), workers, self.peers, self.memory, links)
            for first, second in itertools.combinations(links.own, 2):
                ends[first][second], ends[second][first] = socket.socketpair()
            for rank in links.own[1:]:
                for end in (*ends[rank].values(), *links.ends.get(rank, {}).values()):
                    handed.callback(end.close)
            self._connections = {node: NodeConnection(node, connection) for node, connection in links.nodes.items()}
            try:
                for rank in range(1, size):
                    stage = rank // args.tensor_parallel_size if args.pipeline_parallel_size > 1 else None
                    if rank in links.own:
                        own = None if expert_peers is None else expert_peers.of(expert_peers.first + rank)
                        workers.append(_start(rank, self.memory, ends[rank], links.ends.get(rank, {}), stage, own))
                        message = msgspec.structs.replace(start, rank=rank, local_rank=rank, draft_files={})
                    else:
                        node = links.node_of(rank)
                        workers.append(Worker(rank, RemoteProcess(rank, self._connections[node]), links.controls[rank], stage))
                        own_args = replace(args, model=links.models[node])
                        local_rank = rank - links.ranks[node].start
                        message = msgspec.structs.replace(start, args=own_args, rank=rank, local_rank=local_rank, gpus="")
                    workers[-1].send(wire.encode(message))
            except BaseException:
                self.end()
                raise
            finally:
                if expert_peers is not None:
                    expert_peers.close(range(expert_peers.first + 1, expert_peers.first + size))

    @property
    def count(self) -> int:
        return len(self._workers)

    @property
    def gone(self) -> bool:
        """Whether a rank is lost."""
        return self._dead is not None

    def finish(self) -> None:
        """End the engine for good: other nodes need not wait for a restart."""
        if self._dead is None and self.end.alive:
            for connection in self._connections.values():
                connection.close()
        self.end()

    def check(self) -> None:
        """Raise EngineDead if a rank is lost."""
        if self._dead is not None:
            raise type(self._dead)(str(self._dead))
        if not self.end.alive:
            raise EngineDead("the ranks have been stopped")
        for worker in self._workers:
            if worker.poll() is not None:
                self.lost(worker.rank)

    def any_ended(self) -> bool:
        """Return whether the process of a rank has ended. Called in any thread."""
        return any(worker.poll() is not None for worker in self._workers)

    def give_up(self, reason: str, kind: type[EngineDead] = EngineDead) -> EngineDead:
        """Return the error that `check` raises from now on: the ranks are out of step."""
        self._dead = self._dead or kind(reason)
        return type(self._dead)(str(self._dead))

    def send(self, command: wire.Command, ranks: Collection[int] | None = None) -> None:
        """Send a command to these ranks; None: to all."""
        frame = wire.encode(command)
        for worker in self._workers:
            if ranks is not None and worker.rank not in ranks:
                continue
            try:
                worker.send(frame)
            except TimeoutError:
                raise self.give_up(f"{worker.name} has not read for {SEND_TIMEOUT_S:.0f} s") from None
            except OSError:
                self.lost(worker.rank)

    def started(self) -> None:
        """Note that all ranks have started."""
        self._starts = False

    def read_adapter(self, ref: AdapterRef, needed: bool = True) -> None:
        """Let all ranks read an adapter. Called in any thread; a lost rank is reported by the next step."""
        frame = wire.encode(wire.ReadAdapter(ref, needed))
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.send(frame)

    def answers(self) -> list[Any]:
        """Return the answers of all ranks to one CallRank, in their order. The only time limit is that of the start."""
        began = time.monotonic()
        while late := [worker for worker in self._workers if not worker.answers]:
            received = _wait(late, POLL_S)
            for worker in late:
                worker.receive()
                if worker.failure is not None or worker.closed:
                    self.lost(worker.rank)
            if not received:
                self._refuse_stopped(late, time.monotonic() - began)
                self._refuse_late_start(late)
        return [worker.answers.pop(0) for worker in self._workers]

    # ---- late and lost ranks

    def lost(self, rank: int) -> NoReturn:
        """Raise with the rank that failed, and how. Ranks that end only because another one did are not the cause."""
        deadline = time.monotonic() + (SHARED_FAILURE_TIMEOUT_S if self._shares else FAILURE_TIMEOUT_S)
        while True:
            codes = {worker: worker.poll() for worker in self._workers}
            for worker in self._workers:
                worker.receive()
            failed = [worker for worker in self._workers if worker.failure is not None]
            if failed:
                raise self._failed(failed[0])
            ended = [(worker, code) for worker, code in codes.items() if code is not None]
            for worker, code in ended:
                if code != LOST:
                    raise self.give_up(f"{worker.name} {_exit_description(code, remote=not worker.process.pid)}")
            if time.monotonic() > deadline:
                if self._shares and ended:
                    raise self.give_up("another engine, which has some of its experts, is gone", ExpertPeerLost)
                [worker] = [worker for worker in self._workers if worker.rank == rank]
                raise self.give_up(f"{worker.name} has closed its connections")
            time.sleep(0.01)

    def late(self, ranks: Sequence[int], seconds: float) -> None:
        self.refuse_stopped(seconds)  # a late rank may itself wait for another one
        late = [worker for worker in self._workers if worker.rank in ranks]
        self._refuse_late_start(late)
        if seconds > self._timeouts.hang:
            raise self._late(late, seconds)

    def find_blocking(self, seconds: float, in_step: bool, late: Callable[[], Sequence[int]]) -> EngineDead | None:
        """Return why the call of this host that has taken this long will not end; None: it may end. Called in any thread.

        late: returns the ranks that the device waits for, as far as that is known.
        """
        if (stopped := _find_stopped(self._workers, seconds)) is not None:
            return self._stopped(stopped, seconds)
        if not in_step or seconds <= self._timeouts.hang:
            return None
        ranks = late()
        return self._late([worker for worker in self._workers if worker.rank in ranks] or self._workers, seconds)

    def refuse_stopped(self, seconds: float) -> None:
        """Raise if any rank is stopped and has delayed the others."""
        self._refuse_stopped(self._workers, seconds)

    def _refuse_stopped(self, late: Sequence[Worker], seconds: float) -> None:
        for worker in late:
            if not worker.process.pid and worker.poll() is not None:  # its node has reported it
                self.lost(worker.rank)
        if (stopped := _find_stopped(late, seconds)) is not None:
            raise self._stopped(stopped, seconds)

    def _stopped(self, worker: Worker, seconds: float) -> EngineDead:
        return self.give_up(f"{worker.name} is stopped (SIGSTOP) and delayed the other ranks for {seconds:.1f} s")

    def _late(self, late: Sequence[Worker], seconds: float) -> EngineDead:
        names = " and ".join(worker.name for worker in late)
        limit = "distributed_timeout_seconds or engine_hang_timeout"
        return self.give_up(f"{names} delayed the other ranks for {seconds:.1f} s (limit: {limit})")

    def _refuse_late_start(self, late: Sequence[Worker]) -> None:
        if self._starts and time.monotonic() > self._timeouts.start_by:
            names = " and ".join(worker.name for worker in late)
            raise self.give_up(
                f"{names} did not start in time. Look into the log of that machine, or raise engine_start_timeout"
            )

    def _failed(self, worker: Worker) -> QuireError:
        """Return the error of a failed rank. A failed start raises the same error as in one process."""
        failure = worker.failure
        assert failure is not None
        where = "" if failure.step is None else f" in step {failure.step}"
        dead = self.give_up(f"{worker.name} failed{where}: {failure.kind}: {failure.message}")
        if failure.step is not None:
            return dead
        return ipc.start_error(ipc.Failed(failure.kind, f"{worker.name}: {failure.message}"))


def _find_stopped(workers: Sequence[Worker], seconds: float) -> Worker | None:
    """Return a rank of this node whose process is stopped; None: there is none, or the wait was short."""
    own = [worker for worker in workers if worker.process.pid] if seconds >= STOPPED_TIMEOUT_S else []
    return next((worker for worker in own if is_stopped(worker.process.pid)), None)


def _exit_description(code: int, remote: bool) -> str:
    if remote and -code in (signal.SIGSTOP, signal.SIGHUP):  # as its node reported, or the node is gone
        return "is stopped (SIGSTOP)" if -code == signal.SIGSTOP else "is gone: the connection to its node was closed"
    return f"ended with {exit_reason(code)}"


def _wait(workers: Iterable[Worker], seconds: float) -> bool:
    """Wait until one of them has sent something or is gone."""
    waiting = select.poll()
    for worker in workers:
        waiting.register(worker.socket, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def _start(
    rank: int,
    memory: int,
    peers: dict[int, socket.socket],
    remote: dict[int, socket.socket],
    stage: int | None,
    expert_peers: PeerLinks | None,
) -> Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = spawn_rank(COMMAND, theirs, memory, peers, remote, expert_peers, usable_parent_server())
        except BaseException:
            ours.close()
            raise
    return Worker(rank, process, ours, stage)


def _end(owner: int, workers: Sequence[Worker], peers: dict[int, socket.socket], memory: int, links: Links) -> None:
    if os.getpid() != owner:  # a fork of this process
        return
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        try:
            worker.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("%s still exists %.0f s after SIGKILL, and may hold its GPU", worker.name, END_TIMEOUT_S)
        worker.socket.close()
    for end in peers.values():
        end.close()
    links.close()
    os.close(memory)
