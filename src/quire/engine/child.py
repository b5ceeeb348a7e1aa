"""One engine process as its parent holds it: the process, the connection to it, its log, and its journal.

Whatever happens, `close` leaves nothing behind, and it happens at the latest when this process ends. Nor does a process that is
killed: the journal is a file without a name.
"""

import errno
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from quire.config.args import EngineArgs
from quire.engine import ipc
from quire.engine.companions import Ends
from quire.engine.correspondent import Correspondent
from quire.engine.nursery import PARENT, Forked, Nursery
from quire.frames import Mailbox
from quire.subprocesses import ending, environment, is_stopped
from quire.types.errors import ConfigError

COMMAND = (sys.executable, "-P", "-m", "quire.engine.process")  # -P: what lies in the working directory is not imported
LAST_LINES = 20
_Process = subprocess.Popen[bytes] | Forked


class Child(Correspondent):
    """Without arguments, the process waits for `begin`, and spends the time importing what an engine with a model needs.

    `engine` is its number, of args.data_parallel_size; `serving`: requests come and go while others wait for their tokens.
    `nursery`: who forks it, if that can be. `ends`: its ways to engines that share its experts.
    """

    def __init__(
        self,
        args: EngineArgs | None,
        command: Sequence[str] = COMMAND,
        engine: int = 0,
        serving: bool = True,
        nursery: Nursery | None = None,
        ends: Ends | None = None,
    ) -> None:
        start = None if args is None else first_frame(args, engine, serving)
        self._journal = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with the rest
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            self._journal.close()
            raise
        self._mailbox = Mailbox(ours)
        process: _Process | None = None
        try:
            inner, outer = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            self._journal.close()
            raise
        try:
            options = [*([ipc.AHEAD] if args is None else []), *([] if ends is None else [ends.say()])]
            if nursery is not None:
                process = _fork(nursery, self._journal.fileno(), theirs.fileno(), outer, ends)
            if process is None:
                process = subprocess.Popen(
                    [*command, str(self._journal.fileno()), str(os.getpid()), str(theirs.fileno()), *options],
                    pass_fds=[self._journal.fileno(), theirs.fileno(), *([] if ends is None else ends.descriptors)],
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=outer,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # Ctrl-C is for the parent
                )
        finally:
            theirs.close()
            os.close(outer)
            self._finalizer = weakref.finalize(self, _clean_up, self._mailbox, process, self._journal)
            if process is None:
                os.close(inner)
                self._finalizer()
        self._process = process
        try:
            self._log = Log(os.fdopen(inner, "rb"), process.pid)
        except RuntimeError as error:  # the system gives no thread
            self._finalizer()
            raise OSError(errno.EAGAIN, str(error)) from None
        if start is not None:
            self._mailbox.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stopped(self) -> bool:
        """By SIGSTOP and its kin."""
        return is_stopped(self.pid)

    def begin(self, args: EngineArgs, engine: int = 0, serving: bool = True) -> None:
        self._mailbox.send(first_frame(args, engine, serving))

    def receive(self) -> ipc.Report | None:
        """The next report, None if there is none now."""
        frame = self.receive_frame()
        return None if frame is None else ipc.decode_report(frame)

    def receive_frame(self) -> bytes | None:
        return self._mailbox.receive()

    def ending(self) -> str | None:
        """How the process ended; None while it lives."""
        code = self._process.poll()
        return None if code is None else ending(code)

    def last_words(self) -> str:
        """The end of its log, for a message."""
        return "".join(f"\n  {line}" for line in self.last_lines())

    def last_lines(self) -> list[str]:
        self._log.join(1.0)
        return list(self._log.lines)

    def in_flight(self) -> set[str]:
        """The requests that it worked on when it died."""
        self._journal.seek(0)
        return set(self._journal.read().partition(ipc.END)[0].decode(errors="replace").split("\n"))  # half written, perhaps

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def stop(self, timeout: float) -> None:
        """Asks the process to end, waits up to `timeout` seconds, then ends it."""
        if timeout > 0 and self._process.poll() is None:
            self.send(ipc.Stop())
            self._mailbox.drain(timeout)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.close()

    def close(self) -> None:
        self._finalizer()
        self._log.join(1.0)


class Log(threading.Thread):
    """Copies what the engine process prints to our stderr, line by line."""

    def __init__(self, pipe: IO[bytes], pid: int) -> None:
        super().__init__(name="quire-engine-log", daemon=True)
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self._pipe, self._prefix = pipe, f"(engine {pid})"
        self.start()

    def run(self) -> None:
        with self._pipe:
            for raw in self._pipe:
                line = raw.decode(errors="replace").rstrip()
                self.lines.append(line)
                with suppress(OSError, ValueError):  # our stderr is closed
                    sys.stderr.write(f"{self._prefix} {line}\n")


def first_frame(args: EngineArgs, engine: int, serving: bool) -> bytes:
    try:
        return ipc.encode(ipc.StartEngine(args, logging.getLogger("quire").getEffectiveLevel(), engine, serving))
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"an engine argument cannot be sent to the engine process: {error}") from None


def _fork(nursery: Nursery, journal: int, connection: int, out: int, ends: Ends | None) -> Forked | None:
    """None: it cannot, and a process has to be started."""
    argv, descriptors = ["{0}", PARENT, "{1}"], [journal, connection]
    if ends is not None:
        argv.append(ends.say([f"{{{place}}}" for place in range(2, 2 + len(ends.descriptors))]))
        descriptors += ends.descriptors
    try:
        return nursery.fork("engine", argv, descriptors, out)
    except OSError:
        return None


def _clean_up(mailbox: Mailbox, process: "_Process | None", journal: IO[bytes]) -> None:
    if process is not None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    mailbox.close()
    journal.close()
