"""Processes that start in a blink: one process has imported everything, and forks another whenever one is asked for.

    whoever starts it ──► relay KIND ... ── its descriptors ──► nursery ── fork ──► an engine, or a rank

The relay ends with its process, with the same code, and the process with its relay: killing one ends the other.

    python forked.py nursery ADDRESS KIND        python forked.py relay ADDRESS KIND ...
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
def nursery(directory: Path, kind: str) -> Iterator[tuple[str, ...]]:
    """-> the command for AsyncLLM (kind "engine") or for `workers.COMMAND` (kind "rank")."""
    address = directory / "nursery"
    process = subprocess.Popen([sys.executable, __file__, "nursery", str(address), kind], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield sys.executable, "-S", __file__, "relay", str(address), kind
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def relay(address: str, kind: str, *arguments: str) -> int:
    """Arguments with numbers of descriptors are sent as words that have `#` there, for they will have others."""
    if kind == "engine":
        journal, _, mailbox = arguments
        descriptors, words = [int(journal), int(mailbox)], ["#", "parent", "#"]
    else:
        _, connection, memory, ends, *_ = arguments
        pairs = [end.split(":") for end in ends.split(",")]
        descriptors = [int(connection), int(memory), *(int(fd) for _, fd in pairs)]
        words = ["parent", "#", "#", ",".join(f"{rank}:#" for rank, _ in pairs)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [" ".join([kind, *words]).encode()], [1, 2, *descriptors])
        for descriptor in descriptors[kind == "engine" :]:  # the journal stays open: whoever looks for engines finds us by it
            os.close(descriptor)
        code = server.recv(1)  # when the process ends
    return code[0] if code else 1


def serve(address: str, kind: str) -> None:
    import quire.engine.assemble
    import quire.runner.step

    if kind == "engine":
        import quire.models.fallback  # noqa: F401

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
                code = be_it(connection, parent)
                with contextlib.suppress(OSError):
                    connection.send(bytes([code]))
                os._exit(code)
            connection.close()


def be_it(connection: socket.socket, parent: int) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said, descriptors, _, _ = socket.recv_fds(connection, 1000, 100)
    out, err, *others = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)

    def die_with_the_relay() -> None:
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=die_with_the_relay, daemon=True).start()
    kind, _, rest = said.decode().partition(" ")
    for descriptor in others:
        rest = rest.replace("#", str(descriptor), 1)
    if kind == "engine":
        from quire.engine.process import main
    else:
        from quire.engine.executor.worker import main
    code = main([str(parent) if word == "parent" else word for word in rest.split(" ")])
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.exit({"nursery": serve, "relay": relay}[role](*arguments))
