"""A process that has imported all that an engine needs, and forks one whenever that is asked for: that takes a moment, where a
start spends seconds on imports. `python -P -m quire.engine.nursery PARENT SOCKET [with-us]`.

    whoever restarts engines ── fork: argv, descriptors ──► nursery ─── fork ──► an engine
    an engine of its own     ── fork: argv, descriptors ──► nursery ─── fork ──► its ranks
    a `Forked` ◄── how it ended ─────────────────────────── nursery              closing that connection kills the process

It has one thread and runs nothing but imports, so that forks of it are as good as new processes. All that it forked ends with
it, and the ranks of an engine with that.
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
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from quire.config.cores import wait_politely
from quire.engine import timeline
from quire.subprocesses import WITH_US, end_with_parent, environment, name_process, with_us

COMMAND = (sys.executable, "-P", "-m", "quire.engine.nursery")
PARENT = "PARENT"  # in the arguments of a fork: the pid of who forks it
KINDS = {"engine": "quire.engine.process", "rank": "quire.engine.executor.worker"}
MODULES = (
    "quire.engine.assemble",
    "quire.runner.step",
    "quire.engine.executor.ranks",
    "quire.device.cpu.device",
    "quire.device.cpu.prepare",
    "quire.attn.cpu",
    *KINDS.values(),
)
ANSWER = 5.0  # seconds for a fork
MOST_BYTES, MOST_DESCRIPTORS = 1 << 16, 250
READY = b"ready"

# ---- those who ask


class Forked:
    """A process that the nursery forked, with what `subprocess.Popen` has for one of ours."""

    def __init__(self, pid: int, life: socket.socket) -> None:
        self.pid, self._life = pid, life
        self.returncode: int | None = None
        life.setblocking(False)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                told = self._life.recv(16)
            except BlockingIOError:
                return None
            except OSError:
                told = b""
            self.returncode = int(told) if told else -signal.SIGKILL  # the nursery is gone, and all its forks with it
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


class Nursery:
    """One end of the way to it. `line` of a process that it forked is `ours`."""

    def __init__(self, line: socket.socket) -> None:
        self._line: socket.socket | None = line
        self._ready = False
        line.setblocking(False)

    @property
    def closed(self) -> bool:
        return self._line is None

    @property
    def usable(self) -> bool:
        """Has it imported everything, and is it there?"""
        if not self._ready and self._line is not None:
            try:
                self._ready = self._line.recv(len(READY)) == READY
            except BlockingIOError:
                return False
            except OSError:
                self._ready = False
            if not self._ready:
                self.close()
        return self._ready and self._line is not None

    def fork(self, kind: str, argv: Sequence[str], descriptors: Sequence[int], out: int) -> Forked:
        """`argv`: `{0}` is the first of the descriptors. OSError: it cannot; another way has to be found, now and later."""
        if self._line is None:
            raise ConnectionError("there is no nursery")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                asked = json.dumps([kind, list(argv)]).encode()
                socket.send_fds(self._line, [asked], [theirs.fileno(), out, *descriptors])
            ours.settimeout(ANSWER)
            told = ours.recv(16)
            if not told:
                raise ConnectionError("the nursery is gone")
            return Forked(int(told), ours)
        except OSError:
            ours.close()
            self.close()
            raise

    def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


class NurseryProcess(Nursery):
    """One that this process starts."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*COMMAND, str(os.getpid()), str(theirs.fileno()), *with_us()],
                    pass_fds=[theirs.fileno()],
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        super().__init__(ours)

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


class WarmStart:
    """A nursery for those who restart engines, as soon as it is of use, and another one when it is lost."""

    def __init__(self) -> None:
        self._process: NurseryProcess | None = None

    def prepare(self) -> None:
        """From now on there is to be one."""
        if self._process is None:
            with contextlib.suppress(OSError):  # of no use without, and nothing is lost
                self._process = NurseryProcess()

    def get(self) -> Nursery | None:
        """It, if it can fork now."""
        found = self._process
        if found is None or found.usable:
            return found
        if found.closed:
            self._process = None
            self.prepare()
        return None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


ours: Nursery | None = None  # of a process that was forked: who forks ranks for it

# ---- the nursery itself


class _Fork:
    def __init__(self, pid: int, life: socket.socket, owner: int) -> None:
        self.pid, self.life, self.owner = pid, life, owner


class _Keeper:
    def __init__(self, line: socket.socket) -> None:
        self._lines = {line.fileno(): line}  # of the one who started us, and of every engine
        self._first = line.fileno()
        self._forks: dict[int, _Fork] = {}  # by pid
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        self._poll = select.poll()
        for descriptor in (line.fileno(), self._wake):
            self._poll.register(descriptor, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._pipe = (self._wake, wake)

    def run(self) -> None:
        while self._first in self._lines:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif descriptor in self._lines:
                    self._hear(descriptor)
                else:
                    self._end(descriptor)
            self._bury()
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGKILL)

    def _hear(self, descriptor: int) -> None:
        try:
            asked, descriptors, _, _ = socket.recv_fds(self._lines[descriptor], MOST_BYTES, MOST_DESCRIPTORS)
        except OSError:
            asked, descriptors = b"", []
        if not asked:  # its owner is gone: so are its ranks
            self._poll.unregister(descriptor)
            self._lines.pop(descriptor).close()
            for fork in self._forks.values():
                if fork.owner == descriptor:
                    os.kill(fork.pid, signal.SIGKILL)
            return
        kind, argv = json.loads(asked)
        life = socket.socket(fileno=descriptors[0])
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            self._become(kind, argv, theirs, life, descriptors[1:], mine)
        theirs.close()
        for one in descriptors[1:]:
            os.close(one)
        if kind == "engine":
            self._lines[mine.fileno()] = mine
            self._poll.register(mine, select.POLLIN)
            mine.send(READY)
        else:
            mine.close()
        self._forks[pid] = _Fork(pid, life, descriptor)
        self._poll.register(life, select.POLLIN)
        with contextlib.suppress(OSError):
            life.send(str(pid).encode())

    def _become(
        self, kind: str, argv: list[str], line: socket.socket, life: socket.socket, given: list[int], other: socket.socket
    ) -> NoReturn:
        """In the fork: what the nursery has is not ours."""
        global ours
        parent, code = os.getppid(), 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            os.setpgid(0, 0)
            for held in (*self._lines.values(), *(fork.life for fork in self._forks.values()), life, other):
                held.close()
            for descriptor in self._pipe:
                os.close(descriptor)
            out, *rest = given
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.close(out)
            ours = Nursery(line)
            timeline.begin_anew()
            names = [str(parent) if one == PARENT else _numbered(one, rest) for one in argv]
            main: Any = importlib.import_module(KINDS[kind]).main
            if os.getppid() == parent:
                code = main(names)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _end(self, descriptor: int) -> None:
        """Whoever holds a process asks for its end, by a word or by being gone."""
        for fork in self._forks.values():
            if fork.life.fileno() == descriptor:
                with contextlib.suppress(OSError):
                    fork.life.recv(16)
                os.kill(fork.pid, signal.SIGKILL)  # it is not buried yet, so the number is its own
                self._poll.unregister(descriptor)
                return

    def _bury(self) -> None:
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


def _numbered(text: str, descriptors: Sequence[int]) -> str:
    for place, descriptor in enumerate(descriptors):
        text = text.replace(f"{{{place}}}", str(descriptor))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parent, number, *options = sys.argv[1:] if argv is None else argv
    if WITH_US in options:
        end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(int(number), False)
    if os.getppid() != int(parent):
        return 1
    wait_politely()
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forks need not search it for garbage, nor have copies of its pages for that
    name_process("nursery")
    line = socket.socket(fileno=int(number))
    line.send(READY)
    _Keeper(line).run()
    return 0


if __name__ == "__main__":
    module = importlib.import_module("quire.engine.nursery")  # forks find `ours` there, not in __main__
    sys.exit(module.main())
