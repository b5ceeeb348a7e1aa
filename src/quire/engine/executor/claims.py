"""Who says to be which node, while node 0 waits for all of them. Importing this imports no torch.

Of several who claim a place the newest is tried first; the others wait until it has proved to be a node, or none.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine.handshake import Address, Said, say
from quire.engine.reception import Complaints
from quire.files.reading import shown

MOST = 8  # for one place


@dataclass(frozen=True)
class Claim:
    connection: socket.socket
    place: Address  # where it listens


class Claims:
    def __init__(self, nodes: int, complaints: Complaints) -> None:
        self._lines: dict[int, deque[Claim]] = {node: deque() for node in range(1, nodes)}
        self._complaints = complaints

    def add(self, connection: socket.socket, said: Said) -> None:
        node, host, port = said.get("node"), said.get("host"), said.get("port")
        if not isinstance(host, str) or type(port) is not int:
            self._complaints.tell("one who connected as a node is not one: it did not say where it listens")
            connection.close()
        elif type(node) is not int or node not in self._lines:
            refuse(connection, f"node_rank {shown(node)} is not one of 1 to {len(self._lines)}")
        else:
            self._lines[node].append(Claim(connection, (host, port)))
            if len(self._lines[node]) > MOST:
                self._lines[node].popleft().connection.close()

    @property
    def missing(self) -> int:
        """Places that nobody claims who is still there."""
        for line in self._lines.values():
            while line and is_gone(line[-1].connection):
                line.pop().connection.close()
        return sum(not line for line in self._lines.values())

    @property
    def others(self) -> bool:
        """Is there anybody beside those who were taken?"""
        return any(self._lines.values())

    def take(self) -> Mapping[int, Claim]:
        return {node: line.pop() for node, line in self._lines.items()}

    def refuse(self) -> None:
        """Those that are left: all nodes are there."""
        for node, line in self._lines.items():
            for claim in line:
                refuse(claim.connection, f"node_rank {node} is there already")
            line.clear()

    def close(self) -> None:
        for line in self._lines.values():
            for claim in line:
                claim.connection.close()
            line.clear()


def refuse(connection: socket.socket, why: str) -> None:
    with connection, contextlib.suppress(OSError):
        say(connection, {"refused": why})


def is_gone(connection: socket.socket) -> bool:
    """Has the other end hung up? What it said stays to be heard."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
