"""Start a grammar process, and hold what the engine shares with it: a socket, and memory for the masks."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import weakref

import numpy as np
import numpy.typing as npt

from quire.features.structured.grammar import wire
from quire.proc.channel import Channel
from quire.proc.spawn import ChildProcess, anonymous_memory, command_of, spawn

EXIT_TIMEOUT_S = 1.0  # for a process that closed its socket
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # sent by other processes, never by a fault
COMMAND = command_of("quire.features.structured.grammar.worker")
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # the process forks
Words = npt.NDArray[np.uint32]


class Process:
    def __init__(self, start: wire.StartWorker, words: int, ahead: bool = False, gives_way: bool = False) -> None:
        """
        words: 32-bit words of a mask
        ahead: no request waits for the process yet, so it runs at low priority while it starts
        gives_way: the process always runs at low priority
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(theirs.close)
            rows = start.rows * (1 + start.drafts)
            memory = anonymous_memory("quire-masks", 4 * rows * words)
            cleaning.callback(os.close, memory)
            flags = [flag for flag, wanted in ((wire.AHEAD, ahead), (wire.GIVES_WAY, gives_way)) if wanted]
            shared = (theirs.fileno(), memory)
            self._child = spawn(COMMAND, ["{0}", "{1}", *flags], shared, settings=SINGLE_THREADED, with_thread=True)
            self.masks: Words = np.frombuffer(mmap.mmap(memory, 0), np.uint32).reshape(rows, words)
        self.pid = self._child.pid
        self.started = False  # WorkerStarted was received
        self.mailbox = Channel(ours)  # never blocks: a stopped process does not read
        self.end = weakref.finalize(self, _end, self._child, ours)
        self.mailbox.send(wire.encode(start))

    def killed_from_outside(self) -> bool:
        """Return whether another process ended this one. Must be called before `end`, which kills it."""
        try:
            return -self._child.wait(EXIT_TIMEOUT_S) in OUTSIDE_SIGNALS
        except subprocess.TimeoutExpired:
            return False


def _end(child: ChildProcess, connection: socket.socket) -> int:
    """Kill the process and return its exit status, as `Popen.returncode`."""
    connection.close()
    child.kill()
    return child.wait()
