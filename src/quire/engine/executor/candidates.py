"""Connections that claim to be nodes, while node 0 waits for all nodes. Importing this does not import torch.

    claims a node number ──► is asked for the control connections of its ranks ──► all connected: the candidate is complete

All candidates are asked at once, so one that only claims a number delays no other. Of several complete candidates for a node
the newest is tried first; the others wait until it has turned out to be a node or not.
"""

import contextlib
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.engine.handshake import Address, Hello, RejectionLog, Terms, difference, send_json
from quire.files.reading import shown

MAX_PER_NODE = 8  # candidates


@dataclass(eq=False)
class Candidate:
    """A connection that claims to be a node."""

    connection: socket.socket
    address: Address  # where it listens
    model: str  # the path of its model's files
    missing: set[int]  # ranks whose control connections are missing
    controls: dict[int, socket.socket] = field(default_factory=dict)  # by rank
    name: str = field(default_factory=lambda: secrets.token_hex(8))  # names it in its other connections

    def close(self) -> None:
        for one in (self.connection, *self.controls.values()):
            one.close()


class Candidates:
    """The candidates for all other nodes."""

    def __init__(self, ranks: Sequence[range], terms: Terms, rejections: RejectionLog) -> None:
        """ranks: of every node.
        terms: what every node must have in common with node 0.
        """
        self._ranks, self._terms = ranks, terms
        self.refused: dict[int, str] = {}  # by node: what differed from node 0, until a matching node joins
        self._candidates: dict[int, list[Candidate]] = {node: [] for node in range(1, len(ranks))}
        self._rejections = rejections

    def receive(self, connection: socket.socket, hello: Hello) -> bool:
        """Handle a hello. Return False if it is neither a candidate's nor one of its connections."""
        if "node" in hello:
            self._add(connection, hello)
        elif "claim" in hello:
            self._connect(connection, hello)
        return "node" in hello or "claim" in hello

    def _add(self, connection: socket.socket, hello: Hello) -> None:
        node, host, port = hello.get("node"), hello.get("host"), hello.get("port")
        if not isinstance(host, str) or type(port) is not int:
            self._rejections.log("rejected connection on the cluster port: no address to connect to")
            connection.close()
        elif type(node) is not int or node not in self._candidates:
            refuse(connection, f"node_rank {shown(node)} is not one of 1 to {len(self._candidates)}")
        elif (found := difference(self._terms, hello)) is not None:
            self.refused[node] = found
            self._rejections.log("rejected node %d (%s): %s", node, shown(host), found, level=logging.ERROR)
            refuse(connection, found)
        else:
            own, line = self._ranks[node], self._candidates[node]
            candidate = Candidate(connection, (host, port), str(hello.get("model")), set(own))
            self.refused.pop(node, None)
            try:
                send_json(connection, {"claim": candidate.name, "own": [own.start, own.stop]})
            except OSError:
                connection.close()
                return
            line.append(candidate)
            if len(line) > MAX_PER_NODE:
                oldest = next((one for one in line if one.missing), line[0])
                line.remove(oldest)
                oldest.close()

    def _connect(self, connection: socket.socket, hello: Hello) -> None:
        name, rank = hello["claim"], hello.get("control")
        candidate = next((one for line in self._candidates.values() for one in line if one.name == name), None)
        if candidate is None or type(rank) is not int or rank not in candidate.missing:
            self._rejections.log("rejected connection on the cluster port: no such rank is expected")
            connection.close()
        else:
            candidate.missing.remove(rank)
            candidate.controls[rank] = connection

    @property
    def missing(self) -> list[int]:
        """Nodes without a complete candidate."""
        for line in self._candidates.values():
            for candidate in [one for one in line if is_gone(one.connection)]:
                line.remove(candidate)
                candidate.close()
        return [node for node, line in self._candidates.items() if all(candidate.missing for candidate in line)]

    def absence(self, node: int) -> str:
        """Describe why a node has no complete candidate."""
        ranks = self._ranks[node]
        name = f"node {node} (rank {ranks.start})" if len(ranks) == 1 else f"node {node} (ranks {ranks.start} to {ranks[-1]})"
        if node in self.refused:
            return f"{name} was refused: {self.refused[node]}"
        if self._candidates[node]:
            return f"{name} connected, but not its ranks"
        return f"{name} did not connect"

    @property
    def any_complete(self) -> bool:
        """Whether there is a complete candidate other than those that were taken."""
        return any(not candidate.missing for line in self._candidates.values() for candidate in line)

    def take(self) -> Mapping[int, Candidate]:
        """Return the newest complete candidate of every node. None may be missing."""
        taken = {
            node: next(candidate for candidate in reversed(line) if not candidate.missing)
            for node, line in self._candidates.items()
        }
        for node, candidate in taken.items():
            self._candidates[node].remove(candidate)
        return taken

    def refuse(self) -> None:
        """Refuse the remaining candidates: all nodes have joined."""
        for node, line in self._candidates.items():
            for candidate in line:
                refuse(candidate.connection, f"node_rank {node} has joined already")
                candidate.close()
            line.clear()

    def close(self) -> None:
        for line in self._candidates.values():
            for candidate in line:
                candidate.close()
            line.clear()


def refuse(connection: socket.socket, why: str) -> None:
    with connection, contextlib.suppress(OSError):
        send_json(connection, {"refused": why})


def is_gone(connection: socket.socket) -> bool:
    """Return whether the peer has closed the connection. Data that it sent before stays readable."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
