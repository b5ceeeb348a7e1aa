"""The engine process: `python -m quire.engine.process JOURNAL PARENT SOCKET [ahead]`, started by the supervisor alone.

It receives its arguments, starts a core and turns it: take commands, step, report. A thread tells the parent that the process
lives and for how long the loop has been in the present turn, and ends the process when the parent is gone.
It ignores Ctrl-C, because the parent decides; SIGTERM stops it.
"""

import contextlib
import errno
import gc
import importlib
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
from quire.config.host import take_turns, wait_politely
from quire.engine import ipc
from quire.engine.core import EngineCore
from quire.engine.plan_deadline import PlanDeadline
from quire.engine.timeline import Stopwatch
from quire.features.experts.peers import Ends, read_ends, watch_peers
from quire.proc.channel import Channel
from quire.proc.liveness import Heartbeat
from quire.proc.spawn import set_up
from quire.progress import doing, shown
from quire.types.errors import CompanionLost, EngineDead, QuireError, RequestError
from quire.types.request import EngineRequest

IDLE_WAIT = 500  # milliseconds between looks at the stop signal
COMPANY_WAIT = 100  # milliseconds between looks at engines that share our experts
READ_WAIT = 1  # milliseconds between looks at adapters that are being read
VIEW_WAIT = 100  # milliseconds, where viewers have not been told all
LULL = 50  # milliseconds without work before idle time is used: who asks one thing after the other is not kept waiting
ADMISSION = 0.0015  # seconds that it takes longer to plan and start a step with newcomers
LARGE_REPORT = 0.02  # seconds that the loop waits for one that does not leave at once; what is left then leaves later
FAREWELL = 2.0  # seconds for the last report to leave
GRAMMARS_AHEAD = True  # a server's first structured request finds the grammar process started
CALLS = ("reset_prefix_cache", "retire_adapter", "expect_adapter", "release", "call_all")

logger = logging.getLogger("quire.engine.process")  # __name__ is __main__ here, and would not have the level of quire
LINE = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s [%(name)s] %(message)s", "%Y-%m-%d %H:%M:%S")  # as the server's


class Journal:
    """Who is being worked on, in a file that the parent reads when this process died: no message leaves a dying process."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._page = self._map(mmap.PAGESIZE)

    def write(self, ids: list[str]) -> None:
        data = "\n".join(ids).encode() + ipc.END
        if len(data) > len(self._page):
            self._page = self._map(2 * len(data))
        self._page[: len(data)] = data

    def _map(self, size: int) -> mmap.mmap:
        """The file as memory: writing needs no help of the operating system."""
        have = os.fstat(self._file).st_size
        if os.pwrite(self._file, bytes(size - have), have) < size - have:  # a file with holes would kill us on a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return mmap.mmap(self._file, size)


class Link:
    """The loop's end of the connection."""

    def __init__(self, mailbox: Channel) -> None:
        self._mailbox = mailbox
        self.wait = mailbox.wait

    def send(self, report: ipc.Report) -> None:
        self._mailbox.send(ipc.encode(report))
        self._mailbox.drain(LARGE_REPORT)

    def receive(self) -> ipc.Command | None:
        """The next command, None if there is none now."""
        frame = self._mailbox.receive()
        return None if frame is None else ipc.decode_command(frame)


class EngineLoop:
    """One core, turned by commands."""

    def __init__(
        self, core: EngineCore, link: Link, pulse: Heartbeat, gathers: bool = True, idle_wait: int = IDLE_WAIT
    ) -> None:
        """`gathers`: the next step is planned shortly before the one in flight ends. The first stage of a pipeline has nothing
        to do until then, so it is planned at once. `idle_wait`: milliseconds between looks at the executor."""
        self._core, self._link, self._pulse, self._gathers = core, link, pulse, gathers
        core.constraints.on_refused = partial(self._refuse, added=True)
        self._deadline, self._idle_wait = PlanDeadline(), idle_wait
        self.stopping = False

    def run(self) -> None:
        preparing, patience = True, LULL  # idle time is still of use, once it has lasted so long
        while not self.stopping:
            if not self._core.has_unfinished:
                self._pulse.busy_since = 0.0
                wait = self._tell_viewers()
                if not self._link.wait(patience if preparing else wait):
                    self._pulse.busy_since = time.monotonic() if preparing else 0.0
                    preparing, patience = preparing and self._core.idle(), 0
                    self._core.check()
                    continue
            preparing, patience = True, LULL
            self._pulse.busy_since = time.monotonic()
            self._gather()
            if self._core.has_unfinished and not self.stopping:
                began = time.monotonic()
                deltas = self._core.step()
                self._link.send(ipc.StepReport(deltas, self._core.stats, self._core.tokens))
                self._tell_viewers()
                rows = self._core.rows if self._core.ahead and self._gathers else 0
                self._deadline.turned(began, time.monotonic(), self._core.waited, rows, self._core.tokens)

    def _tell_viewers(self) -> int:
        """Returns how many milliseconds may pass until the next time."""
        watch = self._core.watch
        if watch is None:
            return self._idle_wait
        snapshot = watch.look()
        if snapshot is not None:
            self._link.send(ipc.Seen(snapshot))
        return min(self._idle_wait, VIEW_WAIT if watch.pending else IDLE_WAIT)

    def _gather(self) -> None:
        """Takes commands until the next step has to be planned."""
        due = self._deadline.due
        while not self.stopping:
            while not self.stopping and (command := self._link.receive()) is not None:
                self._obey(command)
                due = self._deadline.due - ADMISSION
            left = int(1000 * (due - time.monotonic()))
            if left <= 0 or not self._core.has_unfinished:
                return
            reading = self._core.adapters.reading
            if not self._link.wait(min(left, READ_WAIT) if reading else left):
                if not reading:
                    return
                self._core.adapters.turn()  # who waits to hear of it may be in the next step

    def _obey(self, command: ipc.Command) -> None:
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
            case ipc.Watch(on):
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


def start(command: ipc.StartEngine, watch: Stopwatch, ends: Ends | None) -> tuple[EngineCore, ipc.Ready]:
    from quire.engine.assemble import resolve_here, start_core

    handler = logging.StreamHandler()
    handler.setFormatter(LINE)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("quire").setLevel(command.log_level)
    with shown(tell=logger.info):
        config = resolve_here(command.args, watch, serving=command.serving, engine=command.engine)
        started = start_core(config, watch, ends=ends)
    if config.max_loras:
        take_turns()
    gc.collect()
    gc.freeze()  # what lives now lives to the end
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
    """Can it be asked for structured outputs, and is it a model that answers?"""
    return not args.skip_tokenizer_init and args.distributed_executor_backend != "fake"


def _tell(line: str) -> None:
    """As logged, also before we are told the level: a display asks the environment whether it is to be quiet."""
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None)
    print(LINE.format(record), file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    file, parent, number, *options = sys.argv[1:] if argv is None else argv
    if not set_up("engine", options, parent, [file, number]):
        return 1
    mailbox = Channel(socket.socket(fileno=int(number)))
    pulse = Heartbeat(lambda busy: mailbox.send(ipc.encode(ipc.Beat(busy))), int(parent))
    pulse.start()
    try:
        watch = Stopwatch.of_engine("python")
        if ipc.AHEAD in options:
            with (
                contextlib.suppress(ImportError),
                shown(tell=_tell),
                doing("importing torch"),
            ):  # errors: told by whoever needs it
                wait_politely()
                importlib.import_module("quire.runner.step")
            watch.lap("imports")
        return _serve(Link(mailbox), pulse, Journal(int(file)), watch, read_ends(options))
    finally:
        pulse.end()
        gc.unfreeze()  # libraries count what is left at the end, and complain
        mailbox.drain(FAREWELL)
        mailbox.close()


def _serve(link: Link, pulse: Heartbeat, journal: Journal, watch: Stopwatch, ends: Ends | None) -> int:
    while (first := link.receive()) is None:
        link.wait(IDLE_WAIT)
    assert isinstance(first, ipc.StartEngine), first
    watch.lap("wait for orders")

    def leave() -> None:
        """What is begun is of no use: the next start meets the next ones."""
        link.send(ipc.Failed(CompanionLost.__name__, "another engine, which has some of its experts, is gone"))
        os._exit(1)

    try:
        with watch_peers(ends, leave):
            core, ready = start(first, watch, ends)
    except QuireError as error:  # told once, by the parent
        link.send(ipc.Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine could not start")
        link.send(ipc.Failed(type(error).__name__, str(error)))
        return 1
    core.before_admission = journal.write
    look = IDLE_WAIT if ends is None else COMPANY_WAIT
    engine = EngineLoop(core, link, pulse, gathers=first.args.pipeline_parallel_size == 1, idle_wait=look)

    def stop(*_: object) -> None:
        engine.stopping = True

    signal.signal(signal.SIGTERM, stop)
    link.send(ready)
    if first.serving and GRAMMARS_AHEAD and needs_grammars(first.args):
        core.constraints.prepare()
    try:
        engine.run()
    except EngineDead as error:  # told by the parent
        if isinstance(error, CompanionLost):
            journal.write([])  # nobody here is to blame
        link.send(ipc.Failed(type(error).__name__, str(error)))
        core.stop()
        return 1
    except Exception:
        logger.exception("the engine's loop failed")
        journal.write(core.scheduler.unfinished)  # those that only wait may be the cause as well
        return 1
    core.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
