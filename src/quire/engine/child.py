"""One engine process as its parent holds it: the process, both channels, its log, and the directory they meet in.

Whatever happens, `close` leaves nothing behind, and it happens at the latest when this process ends.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import zmq

from quire.config.args import EngineArgs
from quire.engine import ipc
from quire.subprocesses import environment
from quire.types.errors import ConfigError

COMMAND = (sys.executable, "-P", "-m", "quire.engine.process")  # -P: what lies in the working directory is not imported
LONGEST_DIRECTORY = 80  # bytes; the address of a Unix socket has 107
LAST_LINES = 20


class Child:
    """Without arguments, the process waits for `begin`, and spends the time importing what an engine with a model needs."""

    def __init__(self, args: EngineArgs | None, command: Sequence[str] = COMMAND) -> None:
        start = None if args is None else _first_frame(args)
        self._directory = _make_directory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        process = None
        try:
            channel = ipc.Channel(self._context, self._directory)
            self._commands, self._reports = channel.sender("commands"), channel.receiver("reports")
            process = subprocess.Popen(
                [*command, str(self._directory), str(os.getpid()), *([ipc.AHEAD] if args is None else [])],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the parent
            )
        finally:
            self._finalizer = weakref.finalize(self, _clean_up, self._context, process, self._directory)
            if process is None:
                self._finalizer()
        self._process = process
        assert process.stdout is not None
        self._log = Log(process.stdout, process.pid)
        if start is not None:
            self._commands.send(start)
        self.fd = int(self._reports.getsockopt(zmq.FD))

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, args: EngineArgs) -> None:
        self._commands.send(_first_frame(args))

    def send(self, command: ipc.Command) -> None:
        self._commands.send(ipc.encode(command))

    def receive(self) -> ipc.Report | None:
        """The next report, None if there is none now."""
        try:
            return ipc.decode_report(self._reports.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def ending(self) -> str | None:
        """How the process ended; None while it lives."""
        code = self._process.poll()
        if code is None or code >= 0:
            return None if code is None else f"exit code {code}"
        return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"

    def last_words(self) -> str:
        """The end of its log, for a message."""
        self._log.join(1.0)
        return "".join(f"\n  {line}" for line in self._log.lines)

    def in_flight(self) -> set[str]:
        """The requests that it worked on when it died."""
        try:
            return set((self._directory / ipc.JOURNAL).read_text().split("\n"))
        except OSError:
            return set()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def stop(self, timeout: float) -> None:
        """Asks the process to end, waits up to `timeout` seconds, then ends it."""
        if timeout > 0 and self._process.poll() is None:
            self.send(ipc.Stop())
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


def _first_frame(args: EngineArgs) -> bytes:
    try:
        return ipc.encode(ipc.Start(args, logging.getLogger("quire").getEffectiveLevel()))
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"an engine argument cannot be sent to the engine process: {error}") from None


def _make_directory() -> Path:
    """A private directory (mode 0700) whose name is short enough for a socket's address."""
    directory = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(os.fsencode(directory)) <= LONGEST_DIRECTORY:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp"))


def _clean_up(context: "zmq.Context[zmq.Socket[bytes]]", process: "subprocess.Popen[bytes] | None", directory: Path) -> None:
    if process is not None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    context.destroy(linger=0)
    shutil.rmtree(directory, ignore_errors=True)
