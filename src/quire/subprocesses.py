"""Processes that we start: how they find our code, what memory they share with us, how they end with us or otherwise, and how
long they have worked."""

import ctypes
import os
import signal
import site
import sys
import tempfile
import threading
from pathlib import Path

ROOT = str(Path(__file__).absolute().parent.parent)
WITH_US = "with-us"  # the argument of a process that is to end when the thread that starts it does
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def environment() -> dict[str, str] | None:
    """Ours. A package that is not installed but was found by a path is to be found by our processes, too."""
    if ROOT in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}


def with_us(lasting: bool = False) -> list[str]:
    """The argument, if this thread is `lasting` or the main one: Linux tells a process of the end of a thread, not of its
    parent. Others hear of it by their socket, unless they are stopped."""
    return [WITH_US] if lasting or threading.current_thread() is threading.main_thread() else []


def end_with_parent() -> None:
    """This process is killed when the thread that started it ends, however that comes about, and even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` call this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"quire-{name}".encode(), 0, 0, 0)


def nameless_memory(name: str, size: int = 0) -> int:
    """A file without a name, which is gone with the last process that has it open. What was never written takes no memory.
    `name`: for whoever looks at a process."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory


def ending(code: int) -> str:
    """How a process ended, by its `Popen.returncode`."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"


def is_stopped(pid: int) -> bool:
    """By SIGSTOP and its kin, not by a debugger; False where that cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def processor_time(pid: int) -> float | None:
    """Seconds a process has run, where that can be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
