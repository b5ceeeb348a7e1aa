"""Ranks that start in a blink: one process has imported everything, and forks a rank whenever one is asked for.

    LLM ──► relay PARENT SOCKET MEMORY ENDS ... ── its descriptors ──► nursery ── fork ──► rank

The relay ends with its rank, with the same code, and the rank with its relay.

    python forked_ranks.py nursery ADDRESS        python forked_ranks.py relay ADDRESS PARENT SOCKET MEMORY ENDS ...
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
def rank_nursery(directory: Path) -> Iterator[tuple[str, ...]]:
    """-> the command for `workers.COMMAND`."""
    address = directory / "ranks"
    process = subprocess.Popen([sys.executable, __file__, "nursery", str(address)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield sys.executable, "-S", __file__, "relay", str(address)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def relay(address: str, _: str, connection: str, memory: str, ends: str, *options: str) -> int:
    pairs = [end.split(":") for end in ends.split(",")]
    descriptors = [1, 2, int(connection), int(memory), *(int(fd) for _, fd in pairs)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [",".join(rank for rank, _ in pairs).encode()], descriptors)
        for descriptor in descriptors[2:]:
            os.close(descriptor)
        code = server.recv(1)  # when the rank ends
    return code[0] if code else 1


def serve(address: str) -> None:
    import quire.engine.assemble
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
                code = be_a_rank(connection, parent)
                connection.send(bytes([code]))
                os._exit(code)
            connection.close()


def be_a_rank(connection: socket.socket, parent: int) -> int:
    from quire.engine.executor.worker import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ranks, descriptors, _, _ = socket.recv_fds(connection, 1000, 100)
    out, err, control, memory, *ends = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)

    def die_with_the_relay() -> None:
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=die_with_the_relay, daemon=True).start()
    pairs = [f"{rank}:{fd}" for rank, fd in zip(ranks.decode().split(","), ends, strict=True)]
    code = main([str(parent), str(control), str(memory), ",".join(pairs)])
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.exit({"nursery": serve, "relay": relay}[role](*arguments))
