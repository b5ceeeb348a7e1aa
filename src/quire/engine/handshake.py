"""How processes of several machines, the nodes, meet over TCP: whoever connects says who it is, in a message of JSON.

Whoever can connect is taken, if it knows the key (QUIRE_CLUSTER_KEY; none by default): run it in a network that others cannot
reach. Nothing received is ever executed or unpickled.
"""

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

from quire.types.errors import EngineError

KEY = "QUIRE_CLUSTER_KEY"
LONGEST = 1 << 16  # bytes of a message
HELLO = 10.0  # seconds for one who connected to say who it is
AGAIN = 0.1  # seconds between two attempts to connect
PROBE_AFTER_S, PROBE_EVERY_S, UNANSWERED_PROBES = 5, 2, 3  # of an idle connection: its peer is lost within 11 s
UNACKNOWLEDGED_S = 10  # how long a peer may leave data or probes unacknowledged
LENGTH = struct.Struct("<I")  # of the message behind it
Address = tuple[str, int]
Said = dict[str, Any]


class HungUp(EngineError):
    """The other end of a connection was closed."""


def cluster_key() -> str:
    return os.environ.get(KEY, "")


def listen(address: Address) -> socket.socket:
    try:
        return socket.create_server(address, backlog=1024, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError as error:
        raise EngineError(f"cannot listen on {address[0]}, port {address[1]}, for other nodes: {error.strerror}") from None


def address_towards(first: Address) -> str:
    """By which other nodes reach this one: that of the way to node 0."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(*first, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"{first[0]}: {error.strerror or error}") from None


def connect(address: Address, deadline: float, check: Callable[[], None] = lambda: None) -> socket.socket:
    """Whoever is not there yet may come. `check` raises when it is not wanted any more."""
    while True:
        check()
        try:
            made = socket.create_connection(address, timeout=HELLO)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(f"{address[0]}, port {address[1]}, cannot be reached: {error}") from None
            time.sleep(AGAIN)
        else:
            made.settimeout(None)
            probe(made)
            return made


def probe(connection: socket.socket) -> None:
    """Notice a peer that vanished without closing this connection, while the connection is idle.

    A connection with unacknowledged data is not probed. It may stay so for long where a rank computes and does not read.
    """
    with contextlib.suppress(OSError):  # the peer is gone already, which is noticed when the connection is read
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_tcp(connection, "TCP_KEEPIDLE", PROBE_AFTER_S)
    _set_tcp(connection, "TCP_KEEPINTVL", PROBE_EVERY_S)
    _set_tcp(connection, "TCP_KEEPCNT", UNANSWERED_PROBES)


def keep_alive(connection: socket.socket) -> None:
    """Send messages at once, and notice a peer that vanished also while data is unacknowledged.

    For connections whose peer always reads: the system closes one whose data finds no room at the peer for as long.
    """
    probe(connection)
    _set_tcp(connection, "TCP_NODELAY", 1)
    _set_tcp(connection, "TCP_USER_TIMEOUT", 1000 * UNACKNOWLEDGED_S)


def _set_tcp(connection: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, name, None)  # not every system has all of them
    if option is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def say(connection: socket.socket, what: Mapping[str, Any]) -> None:
    data = json.dumps(what).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def heard(connection: socket.socket, seconds: float) -> Said:
    """A whole message. Bytes behind it stay where they are: they are for whoever gets the connection next."""
    deadline = time.monotonic() + seconds
    try:
        (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size, deadline))
        if size > LONGEST:
            raise EngineError("another node said what no node says")
        return parse(_exactly(connection, size, deadline))
    except TimeoutError as error:
        if error.errno is not None:  # from the system, which `probe` or `keep_alive` asked to watch the peer
            raise HungUp("another node has vanished") from None
        raise EngineError("another node said nothing in time") from None
    finally:
        connection.settimeout(None)


def parse(data: bytes | bytearray) -> Said:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        raise EngineError("another node said what no node says") from None
    if not isinstance(said, dict):
        raise EngineError("another node said what no node says")
    return said


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        piece = connection.recv(count - len(data))
        if not piece:
            raise HungUp("another node has hung up")
        data += piece
    return data
