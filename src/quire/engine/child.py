"""One engine process as its parent has it: the process, its connection, its log and its journal.

`close` frees everything, at the latest when this process ends. Nothing is left of a killed process either: the journal is a
file without a name.
"""

import errno
import logging
import os
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from quire.config.args import EngineArgs, local_engines
from quire.engine import ipc
from quire.features.experts.peers import PeerLinks
from quire.proc.channel import Channel
from quire.proc.fork_server import ForkServer, LazyForkServer
from quire.proc.spawn import PARENT, ChildProcess, LogPipe, command_of, exit_reason, is_stopped, spawn
from quire.types.errors import ConfigError

COMMAND = command_of("quire.engine.process")
PRELOADED_MODULES = (
    "quire.engine.assemble",
    "quire.runner.step",
    "quire.engine.executor.local",
    "quire.device.cpu.device",
    "quire.device.cpu.prepare",
    "quire.attn.cpu",
    "quire.engine.process",
    "quire.engine.executor.worker",
)  # in the fork server


class EngineConnection:
    """Commands to an engine process and its reports, over a channel."""

    _channel: Channel

    @property
    def fd(self) -> int:
        """A descriptor that is readable when there are reports, or never will be again (`closed`)."""
        return self._channel.fileno()

    @property
    def closed(self) -> bool:
        """Whether the engine process will send no more reports."""
        return self._channel.closed

    @property
    def full(self) -> bool:
        """Whether commands are unsent: `flush` when `fd` is writable."""
        return self._channel.full

    def flush(self) -> None:
        self._channel.flush()

    def send(self, command: ipc.Command) -> None:
        self.send_frame(ipc.encode(command))

    def send_frame(self, frame: bytes) -> None:
        self._channel.send(frame)


class Child(EngineConnection):
    """An engine process of this machine."""

    def __init__(
        self,
        args: EngineArgs,
        command: Sequence[str] = COMMAND,
        engine: int = 0,
        serving: bool = True,
        server: ForkServer | None = None,
        ends: PeerLinks | None = None,
    ) -> None:
        """Start the process.

        engine: its number, of args.data_parallel_size.
        serving: requests arrive while others run.
        server: forks the process, if it can.
        ends: connections to engines that share its experts.
        """
        start = first_frame(args, engine, serving)
        self._journal = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with the rest
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            self._journal.close()
            raise
        self._channel = Channel(ours)
        process: ChildProcess | None = None
        try:
            inner, outer = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            self._journal.close()
            raise
        try:
            arguments, descriptors = ["{0}", PARENT, "{1}"], [self._journal.fileno(), theirs.fileno()]
            if ends is not None:
                arguments.append(ends.as_option([f"{{{i}}}" for i in range(2, 2 + len(ends.descriptors))]))
                descriptors += ends.descriptors
            process = spawn(command, arguments, descriptors, server=server, output=outer)
        finally:
            theirs.close()
            os.close(outer)
            self._finalizer = weakref.finalize(self, _clean_up, self._channel, process, self._journal)
            if process is None:
                os.close(inner)
                self._finalizer()
        self._process = process
        try:
            self._log = LogPipe(os.fdopen(inner, "rb"), f"(engine {process.pid})", process.pid)
        except RuntimeError as error:  # the system has no thread left
            self._finalizer()
            raise OSError(errno.EAGAIN, str(error)) from None
        self._channel.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, by SIGSTOP for example."""
        return is_stopped(self.pid)

    def receive(self) -> ipc.Report | None:
        """Return the next report, None if there is none now."""
        frame = self.receive_frame()
        return None if frame is None else ipc.decode_report(frame)

    def receive_frame(self) -> bytes | None:
        return self._channel.receive()

    def ending(self) -> str | None:
        """Return how the process ended; None while it lives."""
        code = self._process.poll()
        return None if code is None else exit_reason(code)

    def log_tail(self) -> str:
        """Return the end of its log, for an error message."""
        return "".join(f"\n  {line}" for line in self.last_lines())

    def last_lines(self) -> list[str]:
        self._log.join(1.0)
        return list(self._log.lines)

    def in_flight(self) -> set[str]:
        """Return the requests that were running when it died."""
        self._journal.seek(0)
        return set(
            self._journal.read().partition(ipc.JOURNAL_END)[0].decode(errors="replace").split("\n")
        )  # it may be incomplete

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def stop(self, timeout: float) -> None:
        """Ask the process to end, wait up to `timeout` seconds, then kill it."""
        if timeout > 0 and self._process.poll() is None:
            self.send(ipc.Stop())
            self._channel.drain(timeout)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.close()

    def close(self) -> None:
        self._finalizer()
        self._log.join(1.0)


def engine_fork_server() -> LazyForkServer:
    """Return the fork server for engines. It imports what they need when it is prepared."""
    return LazyForkServer(PRELOADED_MODULES)


def forks_engines(args: EngineArgs) -> bool:
    """Return whether engines of this machine are forked from a process that has imported what they need."""
    return bool(args.warm_restart and local_engines(args)) and args.distributed_executor_backend != "fake"


def first_frame(args: EngineArgs, engine: int, serving: bool) -> bytes:
    try:
        return ipc.encode(ipc.StartEngine(args, logging.getLogger("quire").getEffectiveLevel(), engine, serving))
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"an engine argument cannot be sent to the engine process: {error}") from None


def _clean_up(channel: Channel, process: ChildProcess | None, journal: IO[bytes]) -> None:
    if process is not None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    channel.close()
    journal.close()
