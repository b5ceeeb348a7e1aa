"""An API process: `python -m quire.serve.api_workers.process PARENT SOCKET LISTENER,... [with-thread]`."""

import socket
import sys
from collections.abc import Sequence

from quire.proc.spawn import set_up


def main(argv: Sequence[str] | None = None) -> int:
    parent, connection, listeners, *options = sys.argv[1:] if argv is None else argv
    if not set_up("api", options, parent, [connection, *listeners.split(",")]):
        return 1
    from quire.serve.api_workers import wire  # while engines are started
    from quire.serve.api_workers.client import ApiWorker
    from quire.serve.launch import run_api_worker

    channel = wire.WorkerChannel(socket.socket(fileno=int(connection)))
    try:
        begin = wire.decode_down(channel.receive())
    except EOFError:
        return 1
    assert isinstance(begin, wire.Begin), begin
    return run_api_worker(ApiWorker(begin, channel), [socket.socket(fileno=int(one)) for one in listeners.split(",")])


if __name__ == "__main__":
    sys.exit(main())
