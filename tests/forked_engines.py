"""Engine processes that start in a blink: one process has imported everything, and forks an engine whenever one is asked for.

    AsyncLLM ──► relay JOURNAL PARENT SOCKET ── its descriptors ──► nursery ── fork ──► engine

The relay lives as long as its engine does, and the engine as its relay: killing one ends the other.

    python forked_engines.py nursery ADDRESS        python forked_engines.py relay ADDRESS JOURNAL PARENT SOCKET
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def nursery(directory: Path) -> Iterator[tuple[str, ...]]:
    """-> the command for AsyncLLM."""
    address = directory / "nursery"
    process = subprocess.Popen([sys.executable, __file__, "nursery", str(address)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield sys.executable, "-S", __file__, "relay", str(address)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def relay(address: str, journal: str, _: str, mailbox: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"!"], [1, 2, int(journal), int(mailbox)])
        os.close(int(mailbox))
        server.recv(1)  # until the engine ends


def serve(address: str) -> None:
    import quire.models.fallback
    import quire.runner.step  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            parent = os.getpid()
            if os.fork() == 0:
                server.close()
                os._exit(be_an_engine(connection, parent))
            connection.close()


def be_an_engine(connection: socket.socket, parent: int) -> int:
    from quire.engine.process import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
    out, err, journal, mailbox = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)

    def die_with_the_relay() -> None:
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=die_with_the_relay, daemon=True).start()
    code = main([str(journal), str(parent), str(mailbox)])
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    {"nursery": serve, "relay": relay}[role](*arguments)
