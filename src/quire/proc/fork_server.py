"""A process that has imported what engines and ranks need, and forks them: milliseconds instead of seconds of imports.

    parent              ── fork: module, argv, descriptors ──► fork server ── fork ──► an engine
    a forked engine     ── fork: module, argv, descriptors ──► fork server ── fork ──► its ranks
    `Forked` in either  ◄── exit code ──────────────────────── fork server             closing that connection kills the process

`python -P -m quire.proc.fork_server PARENT SOCKET [with-thread]`. The server has one thread and runs nothing but
imports, so forks of it are as good as new processes. Its forks end with it, and the ranks of an engine with that engine.

The standard library's fork server (`multiprocessing.forkserver`) does not fit: it unpickles what it is sent, and its children
neither inherit arbitrary descriptors nor end with it.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from quire.config.host import limit_thread_spinning
from quire.proc.spawn import PARENT, command_of, end_with_parent, fill_in, name_process, set_up, spawn

COMMAND = command_of("quire.proc.fork_server")
FORK_TIMEOUT_S = 5.0
POLL_S = 0.05
MAX_REQUEST_BYTES, MAX_DESCRIPTORS = 1 << 16, 250
READY = b"ready"

# ---- clients of the server


class Forked:
    """A process that the server forked, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int, life: socket.socket) -> None:
        self.pid, self._life = pid, life
        self.returncode: int | None = None
        life.setblocking(False)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                code = self._life.recv(16)
            except BlockingIOError:
                return None
            except OSError:
                code = b""
            self.returncode = int(code) if code else -signal.SIGKILL  # the server is gone, and all its forks with it
            self._life.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 3600.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            waiting = select.poll()
            waiting.register(self._life, select.POLLIN)
            waiting.poll(1000 * min(left, 0.5))
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(OSError):
                self._life.send(b"k")


class ForkServer:
    """A connection to the server. In a forked process, `parent_server` is one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection
        self._ready = False
        connection.setblocking(False)

    @property
    def closed(self) -> bool:
        return self._connection is None

    @property
    def usable(self) -> bool:
        """Whether the server runs and its imports are done."""
        if not self._ready and self._connection is not None:
            try:
                self._ready = self._connection.recv(len(READY)) == READY
            except BlockingIOError:
                return False
            except OSError:
                self._ready = False
            if not self._ready:
                self.close()
        return self._ready and self._connection is not None

    def fork(self, module: str, argv: Sequence[str], descriptors: Sequence[int], output: int) -> Forked:
        """Call the module's `main` in a new process; `argv`: see `spawn`. Raises TimeoutError (late) or OSError (gone)."""
        if self._connection is None:
            raise ConnectionError("the fork server is closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                request = json.dumps([module, list(argv)]).encode()
                socket.send_fds(self._connection, [request], [theirs.fileno(), output, *descriptors])
            ours.settimeout(FORK_TIMEOUT_S)
            pid = ours.recv(16)
            if not pid:
                raise ConnectionError("the fork server is gone")
            return Forked(int(pid), ours)
        except TimeoutError:
            ours.close()  # a fork that comes late ends at once; other forks go on
            raise
        except OSError:
            ours.close()
            self.close()
            raise

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class ForkServerProcess(ForkServer):
    """A server that this process starts."""

    def __init__(self, modules: Sequence[str], settings: Mapping[str, str] | None = None, with_thread: bool = True) -> None:
        """modules: that it imports. settings: additional environment variables, of its forks as well.
        with_thread: see `spawn`; without, the server runs what `atexit` has when its parent has ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                arguments = [PARENT, "{0}"]
                self._process = spawn(COMMAND, arguments, [theirs.fileno()], settings=settings, with_thread=with_thread)
                ours.send(json.dumps(list(modules)).encode())  # not in argv, where `ps` would take it for an engine
            except BaseException:
                ours.close()
                raise
        super().__init__(ours)

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


class LazyForkServer:
    """A fork server that is started when `prepare` is called, and replaced when it is lost. Any thread may use it."""

    def __init__(self, modules: Sequence[str], settings: Mapping[str, str] | None = None, with_thread: bool = True) -> None:
        """See `ForkServerProcess`."""
        self._start = partial(ForkServerProcess, modules, settings, with_thread)
        self._process: ForkServerProcess | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        with self._lock:
            self._prepare()

    def _prepare(self) -> None:
        if self._process is None:
            with contextlib.suppress(OSError):  # processes are started without it
                self._process = self._start()

    def get(self, seconds: float = 0.0) -> ForkServer | None:
        """Return the server if it can fork now, or within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                found = self._process
                if found is None or found.usable:
                    return found
                if found.closed:
                    self._process = None
                    self._prepare()
                    return None
            if time.monotonic() >= end:
                return None
            time.sleep(POLL_S)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


parent_server: ForkServer | None = None  # in a forked process: the server that forked it


def usable_parent_server() -> ForkServer | None:
    return parent_server if parent_server is not None and parent_server.usable else None


# ---- the server


class _Fork:
    def __init__(self, pid: int, life: socket.socket, owner: int) -> None:
        self.pid, self.life, self.owner = pid, life, owner


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._clients = {connection.fileno(): connection}  # the process that started us, and every fork
        self._first = connection.fileno()
        self._forks: dict[int, _Fork] = {}  # by pid
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        self._poll = select.poll()
        for descriptor in (connection.fileno(), self._wake):
            self._poll.register(descriptor, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._pipe = (self._wake, wake)

    def run(self) -> None:
        while self._first in self._clients:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif descriptor in self._clients:
                    self._serve(descriptor)
                else:
                    self._kill(descriptor)
            self._reap()
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGKILL)

    def _serve(self, descriptor: int) -> None:
        try:
            request, descriptors, _, _ = socket.recv_fds(self._clients[descriptor], MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        except OSError:
            request, descriptors = b"", []
        if not request:  # the client is gone: so are its forks
            self._poll.unregister(descriptor)
            self._clients.pop(descriptor).close()
            for fork in self._forks.values():
                if fork.owner == descriptor:
                    os.kill(fork.pid, signal.SIGKILL)
            return
        module, argv = json.loads(request)
        life = socket.socket(fileno=descriptors[0])
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            self._become(module, argv, theirs, life, descriptors[1:], mine)
        theirs.close()
        for one in descriptors[1:]:
            os.close(one)
        self._clients[mine.fileno()] = mine
        self._poll.register(mine, select.POLLIN)
        mine.send(READY)
        self._forks[pid] = _Fork(pid, life, descriptor)
        self._poll.register(life, select.POLLIN)
        with contextlib.suppress(OSError):
            life.send(str(pid).encode())

    def _become(
        self, module: str, argv: list[str], own: socket.socket, life: socket.socket, given: list[int], other: socket.socket
    ) -> NoReturn:
        """In the fork: close what belongs to the server, then run the module."""
        global parent_server
        parent, code = os.getppid(), 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            os.setpgid(0, 0)
            for held in (*self._clients.values(), *(fork.life for fork in self._forks.values()), life, other):
                held.close()
            for descriptor in self._pipe:
                os.close(descriptor)
            output, *rest = given
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            parent_server = ForkServer(own)
            main: Any = importlib.import_module(module).main
            if os.getppid() == parent:
                code = main(fill_in(argv, parent, rest))
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _kill(self, descriptor: int) -> None:
        """The owner of a process asks for its end, by a message or by closing the connection."""
        for fork in self._forks.values():
            if fork.life.fileno() == descriptor:
                with contextlib.suppress(OSError):
                    fork.life.recv(16)
                os.kill(fork.pid, signal.SIGKILL)  # it is not reaped yet, so the pid is its own
                self._poll.unregister(descriptor)
                return

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            fork = self._forks.pop(pid)
            with contextlib.suppress(KeyError):
                self._poll.unregister(fork.life)
            with contextlib.suppress(OSError):
                fork.life.send(str(os.waitstatus_to_exitcode(status)).encode())
            fork.life.close()


def main(argv: Sequence[str] | None = None) -> int:
    parent, number, *options = sys.argv[1:] if argv is None else argv
    if not set_up("fork-server", options, parent, [number]):
        return 1
    connection = socket.socket(fileno=int(number))
    modules = connection.recv(MAX_REQUEST_BYTES)
    if not modules:  # the parent is gone
        return 1
    limit_thread_spinning()
    for module in json.loads(modules):
        with contextlib.suppress(ImportError):  # the fork that needs it reports the error
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forks neither search it for garbage nor copy its pages for that
    name_process("fork-server")  # importing may have changed it
    connection.send(READY)
    _Server(connection).run()
    return 0


if __name__ == "__main__":
    module = importlib.import_module("quire.proc.fork_server")  # forks find `parent_server` there, not in __main__
    sys.exit(module.main())
