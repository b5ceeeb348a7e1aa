"""Start a process, set it up, let it end with its parent, collect its output; and facts of running processes."""

import contextlib
import ctypes
import os
import signal
import site
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from quire.proc.logs import piped

if TYPE_CHECKING:
    from quire.proc.fork_server import Forked, ForkServer

ROOT = str(Path(__file__).absolute().parents[2])
WITH_THREAD = "with-thread"  # the argument of a process that ends with the thread that starts it
PARENT = "PARENT"  # in arguments: the pid of the new process's parent
LOG_TAIL_LINES = 20
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class ChildProcess(Protocol):
    """What `subprocess.Popen` and `Forked` have in common."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


# ---- in the parent


def command_of(module: str) -> tuple[str, ...]:
    """The command that runs a module of Quire. -P: files in the working directory are not imported."""
    return (sys.executable, "-P", "-m", module)


def spawn(
    command: Sequence[str],
    arguments: Sequence[str],
    descriptors: Sequence[int] = (),
    *,
    server: "ForkServer | None" = None,
    settings: Mapping[str, str] | None = None,
    output: int | None = None,
    with_thread: bool = False,
) -> "subprocess.Popen[bytes] | Forked":
    """Start a process in its own process group: Ctrl-C is for its parent. Raises OSError.

    command: see `command_of`.
    arguments: `{0}` stands for the number of the first descriptor in the new process, PARENT for the pid of its parent.
    descriptors: that the process inherits.
    server: forks the process, if it can; the command's last part is the module whose `main` it calls.
    settings: additional environment variables; a server's forks have those of the server.
    output: descriptor of its stdout and stderr; those of this process by default.
    with_thread: Linux kills the process when the calling thread ends (see `with_thread_option`).
    """
    if server is not None:
        with contextlib.suppress(OSError):
            return server.fork(command[-1], arguments, descriptors, 2 if output is None else output)
    option = with_thread_option() if with_thread else []
    return subprocess.Popen(
        [*command, *fill_in(arguments, os.getpid(), descriptors), *option],
        pass_fds=descriptors,
        env=environment() if settings is None else {**(environment() or os.environ), **settings},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        process_group=0,
    )


def fill_in(arguments: Sequence[str], parent: int, descriptors: Sequence[int]) -> list[str]:
    """Put the parent's pid and the descriptors' numbers in their places."""
    filled = []
    for text in arguments:
        for i, descriptor in enumerate(descriptors):
            text = text.replace(f"{{{i}}}", str(descriptor))
        filled.append(str(parent) if text == PARENT else text)
    return filled


def environment() -> dict[str, str] | None:
    """Our environment (None: unchanged), in which a package that is not installed is found by its path."""
    if ROOT in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}


def with_thread_option(lasting: bool = False) -> list[str]:
    """Return the argument that binds a process to this thread, if the thread is the main one or `lasting`.

    Linux signals the end of the parent thread, not of the parent process. Processes that other threads start notice the end of
    their parent by their socket, unless they are stopped.
    """
    return [WITH_THREAD] if lasting or threading.current_thread() is threading.main_thread() else []


def anonymous_memory(name: str, size: int = 0) -> int:
    """Return the descriptor of a file without a path, freed with the last process that has it open.

    Pages that were never written take no memory. `name`: shown among the files of a process.
    """
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory


class LogPipe(threading.Thread):
    """Copies the output of a process to our stderr, line by line, and keeps the last lines."""

    def __init__(self, pipe: IO[bytes], prefix: str, process: int) -> None:
        """RuntimeError: the system has no thread left."""
        super().__init__(name="quire-log", daemon=True)
        self.lines: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._pipe, self._prefix, self._process = pipe, prefix, process
        self.start()

    def run(self) -> None:
        with self._pipe:
            for raw in self._pipe:
                line = raw.decode(errors="replace").rstrip()
                self.lines.append(line)
                with contextlib.suppress(OSError, ValueError):  # our stderr is closed
                    sys.stderr.write(f"{piped(self._prefix, self._process, line)}\n")


# ---- in the new process


def set_up(name: str, options: Sequence[str] = (), parent: str = "", descriptors: Iterable[str] = ()) -> bool:
    """Set up a process that `spawn` started; False: its parent has ended already.

    name: for `ps`.
    options: WITH_THREAD is looked for in them.
    parent: its pid, if that is among the arguments.
    descriptors: that were inherited; the children of this process do not inherit them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if WITH_THREAD in options:
        end_with_parent()
    if parent and os.getppid() != int(parent):
        return False
    name_process(name)
    for descriptor in descriptors:
        os.set_inheritable(int(descriptor), False)
    return True


def end_with_parent() -> None:
    """Let Linux kill this process when the thread that started it ends, even while this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def name_process(name: str) -> None:
    """Set what `ps -o comm` and `top` call this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"quire-{name}".encode(), 0, 0, 0)


# ---- facts of a process


def exit_reason(code: int) -> str:
    """How a process ended, by its `Popen.returncode`."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP or a similar signal, not by a debugger; False if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def processor_time(pid: int) -> float | None:
    """CPU seconds of a process; None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
