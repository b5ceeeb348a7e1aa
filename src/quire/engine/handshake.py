"""How processes of several machines, the nodes, meet over TCP: whoever connects says who it is, in a message of JSON.

Whoever can connect is taken, if it knows the key (QUIRE_CLUSTER_KEY; none by default): run it in a network that others cannot
reach. Nothing received is ever executed or unpickled.
"""

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
            return made


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
    except TimeoutError:
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
