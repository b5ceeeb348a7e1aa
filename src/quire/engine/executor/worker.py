"""A rank other than the first: `python -m quire.engine.executor.worker PARENT SOCKET MEMORY RANK:SOCKET,...`, started by
`workers.py` alone.

It executes commands of the first rank: it builds its share of the model and runs the same plans. It gets sampled tokens from
the first rank. Ctrl-C is ignored: the first rank decides.
"""

import contextlib
import gc
import logging
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.host import limit_thread_spinning, shorten_switch_interval
from quire.device.registry import VISIBLE
from quire.engine.agreement import refuse_other_draft, refuse_other_values
from quire.engine.executor import wire
from quire.engine.executor.nodes import REMOTE
from quire.engine.executor.workers import LOST
from quire.features.experts.peers import PeerLinks, read_links
from quire.proc.channel import Frames
from quire.proc.logs import set_up_child
from quire.proc.spawn import set_up
from quire.types.errors import QuireError

if TYPE_CHECKING:
    from quire.features.lora.cache import RankAdapters
    from quire.runner.stage import BegunStep, StageRunner
    from quire.runner.step import Runner

FAILED = 1
IDLE_MS = 50  # milliseconds
logger = logging.getLogger("quire.engine.executor.worker")


class RankLost(Exception):
    """Another rank is gone; the first rank knows which."""


class OtherRanks:
    """The watch of a rank that is not the first: it ends with the others, and waits for them as long as they live."""

    def lost(self, rank: int) -> NoReturn:
        raise RankLost(f"rank {rank} is gone")

    def late(self, ranks: Sequence[int], seconds: float) -> None:
        pass


class Rank:
    """A rank of the model."""

    def __init__(
        self,
        memory: int,
        peers: Mapping[int, socket.socket],
        remote: Mapping[int, socket.socket],
        expert_peers: PeerLinks | None = None,
        on_lost: Callable[[Exception], None] = logger.error,
    ) -> None:
        """peers, remote: connections to ranks of this node, and of others.
        expert_peers: to ranks of other engines, which share its experts; `on_lost` is called, in any thread, when they are
        gone.
        """
        self._memory, self._peers, self._remote, self._expert_peers, self._on_lost = (
            memory,
            peers,
            remote,
            expert_peers,
            on_lost,
        )
        self._runner: Runner | None = None
        self._adapters: RankAdapters | None = None  # since the first use
        self._begun: deque[BegunStep] = deque()  # steps of a pipeline that this rank must finish
        self.step: int | None = None  # the latest one

    def execute(self, command: wire.Command) -> wire.Report | None:
        match command:
            case wire.StartRank():
                self._runner = self._start(command)
            case wire.RunStep(sampled, plan):
                self.step = plan.step
                if sampled is not None:
                    self._started.take_sampled(sampled)
                self._started.launch(plan)
            case wire.Follow(sampled, lengths):
                self._started.take_sampled(sampled)
                self._started.follow(lengths)
            case wire.Idle():
                self._started.idle()
            case wire.ReadAdapter(ref, needed):
                if needed:
                    self._own_adapters.ask(ref)
                else:
                    self._own_adapters.forget_adapter(ref.version)
            case wire.BeginStep(sampled_of, plan):
                self.step = plan.step
                runner = self._staged
                for step, ids in sampled_of.items() if runner.finishes else ():
                    runner.take_sampled_of(step, ids)
                begun = runner.begin(plan)
                if runner.finishes:
                    self._begun.append(begun)
            case wire.FinishStep(step):
                self.step = step
                self._staged.finish(self._begun.popleft())
            case wire.CallRank(method, args):
                return wire.Answer(self._call(method, args))
        return None

    def use_idle_time(self, quiet: Callable[[int], bool]) -> None:
        """Record CUDA graphs if there is no command for a while. Graphs with collectives are recorded at `wire.Idle`."""
        runner, patience = self._runner, IDLE_MS
        if runner is None or runner.graphs is None or runner.records_with_ranks:
            return
        while quiet(patience) and runner.idle():
            patience = 0

    @property
    def has_other_nodes(self) -> bool:
        return bool(self._remote)

    @property
    def _started(self) -> "Runner":
        assert self._runner is not None
        return self._runner

    @property
    def _own_adapters(self) -> "RankAdapters":
        if self._adapters is None:
            from quire.features.lora.cache import RankAdapters
            from quire.features.lora.device import LoRAPart

            self._adapters = RankAdapters(self._started.part(LoRAPart).cache)
        return self._adapters

    @property
    def _staged(self) -> "StageRunner":
        from quire.runner.stage import StageRunner

        assert isinstance(self._runner, StageRunner)
        return self._runner

    def _start(self, command: wire.StartRank) -> "Runner":
        from quire.device.registry import open_device
        from quire.dist.mesh import Position
        from quire.engine.assemble import resolve_here
        from quire.engine.runners import join_expert_peers, make_runner, start_device
        from quire.engine.timeline import Stopwatch

        args, rank = command.args, command.rank
        if command.gpus:
            os.environ[VISIBLE] = command.gpus
        open_device(args.device).take_rank(command.local_rank)
        config = resolve_here(args, Stopwatch(), rank=rank)
        refuse_other_values(config, command.resolved)
        refuse_other_draft(config, command.draft_files)
        if config.max_loras:
            shorten_switch_interval()
        if config.stages > 1:
            from quire.engine.executor.stages import join_pipeline, make_stage_runner

            device = start_device(config, rank)
            ring = join_pipeline(config, device, rank, self._memory, self._peers, OtherRanks(), self._remote)
            return make_stage_runner(config, device, ring)
        position = Position(rank, config.ranks, args.enable_expert_parallel)
        device = start_device(config, rank)
        group = device.group(position, self._memory, self._peers, OtherRanks(), remote=self._remote)
        exchange = None
        if self._expert_peers is not None:
            exchange = join_expert_peers(config, device, self._expert_peers, OtherRanks())
            exchange.on_dead = self._on_lost
        return make_runner(config, device, position, group, exchange)

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        target = self._own_adapters if method.endswith("_adapter") else self._started
        value = getattr(target, method)(*args)
        if method == "allocate":  # the last thing before the first step
            gc.collect()
            gc.freeze()
        return value


def main(argv: Sequence[str] | None = None) -> int:
    parent, connection, memory, ends, *options = sys.argv[1:] if argv is None else argv
    pairs = [end.split(":") for end in ends.split(",") if end]
    if not set_up("rank", options, parent, [connection, memory, *(fd for _, fd in pairs)]):
        return LOST
    set_up_child(logging.Formatter("%(levelname)s %(name)s: %(message)s"), logging.ERROR)
    logging.getLogger("quire").setLevel(logging.ERROR)  # the first rank logs the same
    control = socket.socket(fileno=int(connection))
    frames = Frames(control)
    limit_thread_spinning()
    sockets = {name: socket.socket(fileno=int(fd)) for name, fd in pairs}
    local = {int(name): end for name, end in sockets.items() if not name.startswith(REMOTE)}
    remote = {int(name): end for name, end in sockets.items() if name.startswith(REMOTE)}
    rank = Rank(int(memory), local, remote, read_links(options), lambda error: _end(frames, rank, error))
    try:
        return _serve(frames, rank, control)
    except (RankLost, OSError):  # OSError: of the connection
        return LOST


def _end(frames: Frames, rank: Rank, error: Exception) -> NoReturn:
    """End the process, in another thread. The other ranks notice it and get the reason."""
    if not isinstance(error, RankLost):
        logger.error("a rank's experts failed", exc_info=error)
        with contextlib.suppress(OSError):
            frames.send(wire.encode(wire.RankFailed(type(error).__name__, str(error), rank.step or 0)))
    os._exit(LOST if isinstance(error, RankLost) else FAILED)


def _serve(frames: Frames, rank: Rank, connection: socket.socket) -> int:
    while True:
        while (frame := frames.next()) is None:
            rank.use_idle_time(partial(_is_quiet, connection))
            if not frames.receive():
                return 0
        try:
            report = rank.execute(wire.decode_command(frame))
        except RankLost:
            raise
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("a rank failed")
            elif rank.has_other_nodes:  # the first rank's log is on another machine
                logger.error("a rank failed: %s", error)
            frames.send(wire.encode(wire.RankFailed(type(error).__name__, str(error), rank.step)))
            return FAILED
        if report is not None:
            frames.send(wire.encode(report))


def _is_quiet(connection: socket.socket, milliseconds: int) -> bool:
    """Return whether nothing arrives for this long."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return not waiting.poll(milliseconds)


if __name__ == "__main__":
    sys.exit(main())
