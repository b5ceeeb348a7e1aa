"""An API process: `python -m quire.serve.fronts.process PARENT SOCKET LISTENER,... [with-thread]`, started by the hub alone."""

import os
import signal
import socket
import sys
from collections.abc import Sequence

from quire.proc.spawn import WITH_THREAD, end_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    parent, connection, listeners, *options = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the hub, which sends SIGTERM
    if WITH_THREAD in options:
        end_with_parent()
    if os.getppid() != int(parent):  # it ended before that
        return 1
    from quire.serve.fronts import wire  # imports come before orders: engines are started at the same time
    from quire.serve.fronts.client import Front
    from quire.serve.launch import run_front

    for inherited in (connection, *listeners.split(",")):
        os.set_inheritable(int(inherited), False)
    line = wire.Line(socket.socket(fileno=int(connection)))
    try:
        begin = wire.decode_down(line.receive())
    except EOFError:
        return 1
    assert isinstance(begin, wire.Begin), begin
    return run_front(Front(begin, line), [socket.socket(fileno=int(one)) for one in listeners.split(",")])


if __name__ == "__main__":
    sys.exit(main())
