"""A grammar process as its owner sees it: the child, the socket, and the masks in the memory they share."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import weakref

import numpy as np
import numpy.typing as npt

from quire.features.structured.grammar import wire
from quire.proc.channel import Channel
from quire.proc.spawn import anonymous_memory, environment, with_thread_option

EXIT_TIMEOUT_S = 1.0  # for a process that closed its socket: it is about to end
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what a fault of its own does not send
COMMAND = (sys.executable, "-P", "-m", "quire.features.structured.grammar.worker")
Words = npt.NDArray[np.uint32]


class Process:
    def __init__(self, start: wire.StartWorker, words: int, ahead: bool = False, gives_way: bool = False) -> None:
        """`ahead`: nobody waits for it yet, so it gives way to others while it starts. `gives_way`: it always does."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(theirs.close)
            rows = start.rows * (1 + start.drafts)
            memory = anonymous_memory("quire-masks", 4 * rows * words)
            cleaning.callback(os.close, memory)
            handed = (theirs.fileno(), memory)
            flags = [flag for flag, wanted in ((wire.AHEAD, ahead), (wire.GIVES_WAY, gives_way)) if wanted]
            self._child = subprocess.Popen(
                [*COMMAND, *map(str, handed), *with_thread_option(), *flags],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                process_group=0,
            )
            self.masks: Words = np.frombuffer(mmap.mmap(memory, 0), np.uint32).reshape(rows, words)
        self.pid = self._child.pid
        self.started = False  # it has said so
        self.mailbox = Channel(ours)  # never waits: a process that is stopped does not read
        self.end = weakref.finalize(self, _end, self._child, ours)
        self.mailbox.send(wire.encode(start))

    def killed_from_outside(self) -> bool:
        """Return whether another process ended this one. To be asked before `end`, which kills it."""
        try:
            return -self._child.wait(EXIT_TIMEOUT_S) in OUTSIDE_SIGNALS
        except subprocess.TimeoutExpired:
            return False


def _environment() -> dict[str, str]:
    """It forks, so it had better not have threads that it does not need."""
    return {**(environment() or os.environ), "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _end(child: "subprocess.Popen[bytes]", connection: socket.socket) -> int:
    """-> how it ended, as `Popen.returncode` has it."""
    connection.close()
    child.kill()
    return child.wait()
