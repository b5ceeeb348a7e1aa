"""The engine process: `python -m quire.engine.process JOURNAL PARENT SOCKET`, started by the supervisor alone.

The process receives its arguments, starts an engine core and runs its loop: take commands, step, report. A thread sends
heartbeats to the parent and ends the process when the parent is gone. Ctrl-C is ignored: the parent decides. SIGTERM stops it.
"""

import errno
import gc
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.config.args import EngineArgs
from quire.config.host import shorten_switch_interval
from quire.engine import ipc
from quire.engine.core import EngineCore
from quire.engine.plan_deadline import PlanDeadline
from quire.engine.timeline import Stopwatch
from quire.features.experts.peers import PeerLinks, read_links, watch_peers
from quire.proc.channel import Channel
from quire.proc.liveness import Heartbeat
from quire.proc.logs import set_up_child
from quire.proc.spawn import set_up
from quire.progress import shown
from quire.types.errors import EngineDead, ExpertPeerLost, QuireError, RequestError
from quire.types.request import EngineRequest

IDLE_POLL_MS = 500  # between checks of the stop signal
EXPERT_PEERS_POLL_MS = 100  # between checks of engines that share our experts
ADAPTER_POLL_MS = 1  # between checks of LoRA adapters that are being read
SNAPSHOT_POLL_MS = 100  # while a snapshot is pending
IDLE_WORK_AFTER_MS = 50  # without requests before idle work begins: sequential requests are not delayed
ADMISSION_S = 0.0015  # extra time to plan and start a step with new requests
REPORT_DRAIN_S = 0.02  # that the loop waits for a large report to be sent; the rest is sent later
LAST_REPORT_DRAIN_S = 2.0
GRAMMARS_AHEAD = True  # a server's first structured request finds the grammar process started
CALLS = ("reset_prefix_cache", "retire_adapter", "expect_adapter", "release", "call_all")

logger = logging.getLogger("quire.engine.process")  # __name__ is __main__ here, and would not have the level of quire
LINE = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s [%(name)s] %(message)s", "%Y-%m-%d %H:%M:%S")  # as the server's


class Journal:
    """The requests in flight, in a file that the parent reads when this process has died: a dying process sends no message."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._page = self._map(mmap.PAGESIZE)

    def write(self, ids: list[str]) -> None:
        data = "\n".join(ids).encode() + ipc.JOURNAL_END
        if len(data) > len(self._page):
            self._page = self._map(2 * len(data))
        self._page[: len(data)] = data

    def _map(self, size: int) -> mmap.mmap:
        """Map the file: writing needs no system call."""
        have = os.fstat(self._file).st_size
        if os.pwrite(self._file, bytes(size - have), have) < size - have:  # a sparse file would raise SIGBUS on a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return mmap.mmap(self._file, size)


class Link:
    """The loop's end of the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.wait = channel.wait

    def send(self, report: ipc.Report) -> None:
        self._channel.send(ipc.encode(report))
        self._channel.drain(REPORT_DRAIN_S)

    def receive(self) -> ipc.Command | None:
        """Return the next command, None if there is none now."""
        frame = self._channel.receive()
        return None if frame is None else ipc.decode_command(frame)


class EngineLoop:
    """Run one engine core and execute commands."""

    def __init__(
        self, core: EngineCore, link: Link, pulse: Heartbeat, gathers: bool = True, idle_wait: int = IDLE_POLL_MS
    ) -> None:
        """gathers: plan the next step shortly before the one in flight ends. The first stage of a pipeline is idle until
        then, so it plans at once.
        idle_wait: milliseconds between checks of the executor.
        """
        self._core, self._link, self._pulse, self._gathers = core, link, pulse, gathers
        core.constraints.on_refused = partial(self._refuse, added=True)
        self._deadline, self._idle_wait = PlanDeadline(), idle_wait
        self.stopping = False

    def run(self) -> None:
        preparing, patience = True, IDLE_WORK_AFTER_MS  # whether idle work is left, and milliseconds to wait before it
        while not self.stopping:
            if not self._core.has_unfinished:
                self._pulse.busy_since = 0.0
                wait = self._report_snapshot()
                if not self._link.wait(patience if preparing else wait):
                    self._pulse.busy_since = time.monotonic() if preparing else 0.0
                    preparing, patience = preparing and self._core.idle(), 0
                    self._core.check()
                    continue
            preparing, patience = True, IDLE_WORK_AFTER_MS
            self._pulse.busy_since = time.monotonic()
            self._gather()
            if self._core.has_unfinished and not self.stopping:
                began = time.monotonic()
                deltas = self._core.step()
                self._link.send(ipc.StepReport(deltas, self._core.stats, self._core.tokens))
                self._report_snapshot()
                rows = self._core.rows if self._core.step_in_flight and self._gathers else 0
                self._deadline.turned(began, time.monotonic(), self._core.waited, rows, self._core.tokens)

    def _report_snapshot(self) -> int:
        """Report a snapshot if one is due; return the milliseconds until the next check."""
        watch = self._core.watch
        if watch is None:
            return self._idle_wait
        snapshot = watch.look()
        if snapshot is not None:
            self._link.send(ipc.Seen(snapshot))
        return min(self._idle_wait, SNAPSHOT_POLL_MS if watch.pending else IDLE_POLL_MS)

    def _gather(self) -> None:
        """Take commands until the next step must be planned."""
        due = self._deadline.due
        while not self.stopping:
            while not self.stopping and (command := self._link.receive()) is not None:
                self._execute(command)
                due = self._deadline.due - ADMISSION_S
            left = int(1000 * (due - time.monotonic()))
            if left <= 0 or not self._core.has_unfinished:
                return
            reading = self._core.adapters.reading
            if not self._link.wait(min(left, ADAPTER_POLL_MS) if reading else left):
                if not reading:
                    return
                self._core.adapters.turn()  # a request that waits for the adapter may join the next step

    def _execute(self, command: ipc.Command) -> None:
        match command:
            case ipc.Add():
                for request in command.restored():
                    self._add(request)
            case ipc.Abort(ids):
                self._core.abort(ids)
            case ipc.CallMethod(number, method, args):
                self._link.send(self._call(number, method, args))
            case ipc.LoadAdapter(number, ref, pinned):
                self._core.adapters.load(ref, pinned, partial(self._loaded, number))
            case ipc.SetWatched(on):
                self._core.be_watched(on)
            case ipc.Stop():
                self.stopping = True
            case ipc.StartEngine():
                raise RuntimeError("an engine process is started only once")

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except RequestError as error:
            self._refuse(request.id, error)
        except Exception as error:
            logger.exception("a request could not be added")
            self._link.send(ipc.Refused(request.id, type(error).__name__, str(error), None))

    def _refuse(self, name: str, error: RequestError, added: bool = False) -> None:
        self._link.send(ipc.Refused(name, type(error).__name__, str(error), error.parameter, added))

    def _loaded(self, number: int, error: RequestError | None) -> None:
        kind, parameter = ("", None) if error is None else (type(error).__name__, error.parameter)
        self._link.send(ipc.Reply(number, error is None, None if error is None else str(error), kind, parameter))

    def _call(self, number: int, method: str, args: list[Any]) -> ipc.Reply:
        if method not in CALLS:
            return ipc.Reply(number, None, f"the engine has no method {method!r}; it has {', '.join(CALLS)}")
        try:
            return ipc.Reply(number, getattr(self._core, method)(*args))
        except QuireError as error:
            return ipc.Reply(number, None, f"{type(error).__name__}: {error}")


def start(command: ipc.StartEngine, watch: Stopwatch, ends: PeerLinks | None) -> tuple[EngineCore, ipc.Ready]:
    from quire.engine.assemble import resolve_here, start_core

    set_up_child(LINE, command.log_level)
    with shown(write_line=logger.info):
        config = resolve_here(command.args, watch, serving=command.serving, engine=command.engine)
        started = start_core(config, watch, ends=ends)
    if config.max_loras:
        shorten_switch_interval()
    gc.collect()
    gc.freeze()  # these objects live as long as the process
    return started.core, ipc.Ready(
        max_model_len=started.max_model_len,
        pages=started.pages,
        device=config.device,
        dtype=config.dtype,
        max_batched_tokens=config.max_batched_tokens,
        max_seqs=config.max_seqs,
        depth=config.depth,
        timeline=started.timeline,
        page_size=config.page_size,
        device_name=config.device_facts.name,
    )


def needs_grammars(args: EngineArgs) -> bool:
    """Whether requests with structured outputs are possible."""
    return not args.skip_tokenizer_init and args.distributed_executor_backend != "fake"


def main(argv: Sequence[str] | None = None) -> int:
    file, parent, number, *options = sys.argv[1:] if argv is None else argv
    if not set_up("engine", options, parent, [file, number]):
        return 1
    channel = Channel(socket.socket(fileno=int(number)))
    pulse = Heartbeat(lambda busy: channel.send(ipc.encode(ipc.Beat(busy))), int(parent))
    pulse.start()
    try:
        watch = Stopwatch.of_engine("python")
        return _serve(Link(channel), pulse, Journal(int(file)), watch, read_links(options))
    finally:
        pulse.end()
        gc.unfreeze()  # libraries report objects that are left at exit
        channel.drain(LAST_REPORT_DRAIN_S)
        channel.close()


def _serve(link: Link, pulse: Heartbeat, journal: Journal, watch: Stopwatch, ends: PeerLinks | None) -> int:
    while (first := link.receive()) is None:
        link.wait(IDLE_POLL_MS)
    assert isinstance(first, ipc.StartEngine), first

    def leave() -> None:
        """End this start: the next one connects to the next processes of the other engines."""
        link.send(ipc.Failed(ExpertPeerLost.__name__, "another engine, which has some of its experts, is gone"))
        os._exit(1)

    try:
        with watch_peers(ends, leave):
            core, ready = start(first, watch, ends)
    except QuireError as error:  # the parent logs it
        link.send(ipc.Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine could not start")
        link.send(ipc.Failed(type(error).__name__, str(error)))
        return 1
    core.before_admission = journal.write
    look = IDLE_POLL_MS if ends is None else EXPERT_PEERS_POLL_MS
    engine = EngineLoop(core, link, pulse, gathers=first.args.pipeline_parallel_size == 1, idle_wait=look)

    def stop(*_: object) -> None:
        engine.stopping = True

    signal.signal(signal.SIGTERM, stop)
    link.send(ready)
    if first.serving and GRAMMARS_AHEAD and needs_grammars(first.args):
        core.constraints.prepare()
    try:
        engine.run()
    except EngineDead as error:  # the parent logs it
        if isinstance(error, ExpertPeerLost):
            journal.write([])  # no request of this engine is the cause
        link.send(ipc.Failed(type(error).__name__, str(error)))
        core.stop()
        return 1
    except Exception:
        logger.exception("the engine's loop failed")
        journal.write(core.scheduler.unfinished)  # waiting requests may be the cause, too
        return 1
    core.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
