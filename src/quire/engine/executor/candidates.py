"""Who says to be which node, while node 0 waits for all of them. Importing this imports no torch.

    claims a place ──► is asked for the control connections of its ranks ──► they come: it may be taken, when all places can be

All who claim a place are asked at once, and who only claims it keeps nobody waiting. Of several whose connections came the
newest is tried first; the others wait until it has proved to be a node, or none.
"""

import contextlib
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.engine.handshake import Address, Hello, RejectionLog, Terms, difference, send_json
from quire.files.reading import shown

MOST = 8  # for one place


@dataclass(eq=False)
class Candidate:
    connection: socket.socket
    place: Address  # where it listens
    model: str  # the path of its model's files
    missing: set[int]  # ranks whose control connections are to come
    controls: dict[int, socket.socket] = field(default_factory=dict)  # by rank
    name: str = field(default_factory=lambda: secrets.token_hex(8))  # by which its connections are known

    def close(self) -> None:
        for one in (self.connection, *self.controls.values()):
            one.close()


class Candidates:
    def __init__(self, ranks: Sequence[range], terms: Terms, rejections: RejectionLog) -> None:
        """`ranks`: of every node. `terms`: what every node must have in common with node 0."""
        self._ranks, self._terms = ranks, terms
        self.refused: dict[int, str] = {}  # by node: what differed from node 0, until a node that agrees joins
        self._lines: dict[int, list[Candidate]] = {node: [] for node in range(1, len(ranks))}
        self._rejections = rejections

    def hear(self, connection: socket.socket, said: Hello) -> bool:
        """Of one who connected. False if that is no candidate, and no connection for one."""
        if "node" in said:
            self._add(connection, said)
        elif "claim" in said:
            self._connect(connection, said)
        return "node" in said or "claim" in said

    def _add(self, connection: socket.socket, said: Hello) -> None:
        node, host, port = said.get("node"), said.get("host"), said.get("port")
        if not isinstance(host, str) or type(port) is not int:
            self._rejections.log("one who connected as a node is not one: it did not say where it listens")
            connection.close()
        elif type(node) is not int or node not in self._lines:
            refuse(connection, f"node_rank {shown(node)} is not one of 1 to {len(self._lines)}")
        elif (found := difference(self._terms, said)) is not None:
            self.refused[node] = found
            self._rejections.log("node %d (%s) is refused: %s", node, shown(host), found, level=logging.ERROR)
            refuse(connection, found)
        else:
            own, line = self._ranks[node], self._lines[node]
            candidate = Candidate(connection, (host, port), str(said.get("model")), set(own))
            self.refused.pop(node, None)
            try:
                send_json(connection, {"claim": candidate.name, "own": [own.start, own.stop]})
            except OSError:
                connection.close()
                return
            line.append(candidate)
            if len(line) > MOST:
                oldest = next((one for one in line if one.missing), line[0])
                line.remove(oldest)
                oldest.close()

    def _connect(self, connection: socket.socket, said: Hello) -> None:
        name, rank = said["claim"], said.get("control")
        candidate = next((one for line in self._lines.values() for one in line if one.name == name), None)
        if candidate is None or type(rank) is not int or rank not in candidate.missing:
            self._rejections.log("one who connected as a rank is none that is awaited")
            connection.close()
        else:
            candidate.missing.remove(rank)
            candidate.controls[rank] = connection

    @property
    def missing(self) -> int:
        """Places for which nobody is there with all connections."""
        for line in self._lines.values():
            for candidate in [one for one in line if is_gone(one.connection)]:
                line.remove(candidate)
                candidate.close()
        return sum(all(candidate.missing for candidate in line) for line in self._lines.values())

    @property
    def others(self) -> bool:
        """Is there anybody with all connections beside those who were taken?"""
        return any(not candidate.missing for line in self._lines.values() for candidate in line)

    def take(self) -> Mapping[int, Candidate]:
        """Of every place the newest, now that none is missing."""
        taken = {
            node: next(candidate for candidate in reversed(line) if not candidate.missing) for node, line in self._lines.items()
        }
        for node, candidate in taken.items():
            self._lines[node].remove(candidate)
        return taken

    def refuse(self) -> None:
        """Those that are left: all nodes are there."""
        for node, line in self._lines.items():
            for candidate in line:
                refuse(candidate.connection, f"node_rank {node} is there already")
                candidate.close()
            line.clear()

    def close(self) -> None:
        for line in self._lines.values():
            for candidate in line:
                candidate.close()
            line.clear()


def refuse(connection: socket.socket, why: str) -> None:
    with connection, contextlib.suppress(OSError):
        send_json(connection, {"refused": why})


def is_gone(connection: socket.socket) -> bool:
    """Has the other end hung up? What it said stays to be heard."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
