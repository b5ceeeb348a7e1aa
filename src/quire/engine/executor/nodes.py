"""How ranks on several machines, the nodes, connect to each other. Importing this does not import torch.

    node 0, in the engine        listens at an address that all know ◄── every other node: hello, with its version and model
    node k connects to node 0    a control connection for each of its ranks: without them it is no node, and delays no other
                                 node 0 sends all nodes the ranks ──► and addresses of all nodes
    ... and to all nodes below   a connection for each pair of ranks
    node k starts its ranks      which inherit their ends, like the ranks of node 0 (`workers.py`)

A node whose version, model files or arguments differ from node 0's is refused (`handshake.py`), and both log what differs. If
a peer of all these steps does not connect to the others, node 0 disconnects all nodes, and they connect again.

A peer that knows the key (QUIRE_CLUSTER_KEY; none by default) can be a rank: run nodes in a network that others cannot reach.
Nothing received is ever executed or unpickled.
"""

import contextlib
import itertools
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.executor.candidates import Candidates, is_gone
from quire.engine.handshake import (
    HANDSHAKE_TIMEOUT_S,
    RECONNECT_INTERVAL_S,
    Address,
    HandshakeServer,
    Hello,
    HungUp,
    Terms,
    connect,
    keep_alive,
    listen,
    receive_json,
    send_json,
)  # fmt: skip
from quire.features.experts.peers import PeerLinks
from quire.proc.fork_server import ForkServer
from quire.proc.spawn import PARENT, ChildProcess, anonymous_memory, command_of, is_stopped, spawn
from quire.types.errors import EngineError

WORKER = command_of("quire.engine.executor.worker")
REMOTE = "+"  # prefix of the number of a rank of another node
POLL_S = 0.2  # between checks of a node's ranks
CHECK_EVERY_S = 1.0  # whether missing nodes can still connect
STOPPED_TIMEOUT_S = 0.5  # that a rank may be stopped (SIGSTOP)
FIND_FIRST = ". Start machine 0, and give its master_addr and master_port here"
PEER_CONNECT_TIMEOUT_S = 3.0  # for connections between nodes, if there are other candidates


class _Disconnected(Exception):
    """A node is gone, or was none: all nodes connect again."""


@dataclass
class Links:
    """The connections of a node to others. Its ranks inherit the sockets."""

    ranks: Sequence[range]  # of every node
    node: int = 0
    controls: dict[int, socket.socket] = field(default_factory=dict)  # by rank; on node 0 those of remote ranks
    ends: dict[int, dict[int, socket.socket]] = field(default_factory=dict)  # own rank -> remote rank -> connection
    nodes: dict[int, socket.socket] = field(default_factory=dict)  # on node 0: to every other node; on others: to node 0
    models: dict[int, str] = field(default_factory=dict)  # on node 0: the model's path on every other node
    meeting: str = ""  # id of this attempt; connections of an earlier one are refused
    then: Callable[[], None] = lambda: None  # called after they are closed

    @property
    def own(self) -> range:
        return self.ranks[self.node]

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    def check(self) -> None:
        for node, connection in self.nodes.items():
            if is_gone(connection):
                raise _Disconnected(f"node {node} has disconnected")

    def close(self) -> None:
        for one in (
            *self.controls.values(),
            *self.nodes.values(),
            *(end for ends in self.ends.values() for end in ends.values()),
        ):
            one.close()
        self.then()


def share_ranks(ranks: int, nodes: int) -> list[range]:
    """Divide the ranks as evenly as possible; the first nodes have the first ranks."""
    return [range(ranks * node // nodes, ranks * (node + 1) // nodes) for node in range(nodes)]


# ---- node 0


def gather(
    listener: socket.socket,
    ranks: Sequence[range],
    key: str,
    seconds: float,
    terms: Terms,
    check: Callable[[], None] = lambda: None,
    remedy: str = "Start the same command on each of these machines with its node_rank and --headless",
) -> Links:
    """Wait for all other nodes and for the connections of their ranks. If some are missing, all nodes connect again.

    terms: node 0's; a node that differs is refused, and another one may replace it.
    check: called while nodes are missing; raises if they will not connect.
    remedy: what to do about nodes that do not connect, for the error.
    """
    deadline = time.monotonic() + seconds
    with contextlib.closing(HandshakeServer(listener, key)) as handshakes:
        candidates = Candidates(ranks, terms, handshakes.rejections)
        with contextlib.closing(candidates):
            while True:
                while candidates.missing:
                    check()
                    admitted = handshakes.next(min(CHECK_EVERY_S, deadline - time.monotonic()))
                    if admitted is None and time.monotonic() < deadline:
                        continue
                    if admitted is None:
                        raise _absent(candidates, listener, seconds, remedy)
                    if not candidates.receive(*admitted):
                        _reject(handshakes, admitted[0])
                try:
                    links = _connect_all(candidates, handshakes, ranks, deadline)
                except (_Disconnected, OSError) as error:
                    handshakes.rejections.log("a node failed to join (%s): waiting for all nodes again", error)
                else:
                    candidates.refuse()
                    return links


def _absent(candidates: Candidates, listener: socket.socket, seconds: float, remedy: str) -> EngineError:
    """Return the error for nodes that did not join in time."""
    host, port = listener.getsockname()[:2]
    absences = "; ".join(map(candidates.absence, candidates.missing))
    return EngineError(f"{absences} within {seconds:g} s. {remedy}, and check that it can reach {host}, port {port}")


def _connect_all(candidates: Candidates, handshakes: HandshakeServer, ranks: Sequence[range], deadline: float) -> Links:
    """Connect the complete candidates to each other."""
    there = candidates.take()
    links = Links(ranks, nodes={node: candidate.connection for node, candidate in there.items()}, meeting=secrets.token_hex(8))
    links.models = {node: candidate.model for node, candidate in there.items()}
    links.controls = {rank: control for candidate in there.values() for rank, control in candidate.controls.items()}
    setup = {
        "ranks": [[own.start, own.stop] for own in ranks],
        "nodes": [("", 0), *(there[node].address for node in sorted(there))],
        "meeting": links.meeting,
    }
    try:
        for connection in links.nodes.values():
            keep_alive(connection)
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            send_json(connection, setup)
            connection.settimeout(None)
        _take_ends(handshakes, links, deadline, candidates)
    except BaseException:
        links.close()
        raise
    return links


# ---- the others


def join(first: Address, node: int, host: str, key: str, seconds: float, terms: Terms) -> Links:
    """Join node 0, again if it disconnects. Raises EngineError if it refuses this node.

    host: the address of this node.
    terms: this node's version, model files and arguments.
    """
    deadline = time.monotonic() + seconds
    while True:
        with listen((host, 0)) as listener, contextlib.closing(HandshakeServer(listener, key)) as handshakes:
            links = Links((), node, nodes={0: connect(first, deadline, change=FIND_FIRST)})
            try:
                hello = {"node": node, "host": host, "port": listener.getsockname()[1], **terms}
                _join_once(links, handshakes, first, hello, key, deadline)
            except (_Disconnected, HungUp, OSError) as error:
                links.close()
                if time.monotonic() > deadline:
                    raise EngineError(f"{first[0]}, port {first[1]}, has disconnected: {error}{FIND_FIRST}") from None
            except BaseException:
                links.close()
                raise
            else:
                return links
        time.sleep(RECONNECT_INTERVAL_S)


def _join_once(links: Links, handshakes: HandshakeServer, first: Address, who: Hello, key: str, deadline: float) -> None:
    to_first, node = links.nodes[0], links.node
    keep_alive(to_first)
    send_json(to_first, {"key": key, **who})
    asked = _receive(to_first, deadline)
    for rank in range(*asked["own"]):
        links.controls[rank] = connect(first, deadline, links.check)
        send_json(links.controls[rank], {"key": key, "claim": asked["claim"], "control": rank})
    message = _receive(to_first, deadline)
    links.ranks = [range(*ranks) for ranks in message["ranks"]]
    links.meeting = message["meeting"]
    places = [first, *(tuple(place) for place in message["nodes"][1:])]
    hello = {"key": key, "meeting": links.meeting}
    for rank in links.own:
        for below in range(node):
            for other in links.ranks[below]:
                end = connect(places[below], deadline, links.check)
                send_json(end, {**hello, "from": rank, "to": other})
                links.ends.setdefault(rank, {})[other] = end
    _take_ends(handshakes, links, deadline)


def _receive(first: socket.socket, deadline: float) -> dict[str, Any]:
    message = receive_json(first, deadline - time.monotonic())
    if "refused" in message:
        raise EngineError(f"node 0 refused this node: {message['refused']}")
    return message


class NodeRanks:
    """The ranks of a node other than the first, started here."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.processes: dict[int, ChildProcess] = {}
        memory = anonymous_memory("quire-ranks")
        ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in links.own}
        for one, other in itertools.combinations(links.own, 2):
            ends[one][other], ends[other][one] = socket.socketpair()
        try:
            for rank in links.own:
                self.processes[rank] = spawn_rank(WORKER, links.controls[rank], memory, ends[rank], links.ends.get(rank, {}))
        except BaseException:
            self.end()
            raise
        finally:
            os.close(memory)
            for mine in ends.values():
                for end in mine.values():
                    end.close()
            for inherited in (*links.controls.values(), *(end for mine in links.ends.values() for end in mine.values())):
                inherited.close()

    def watch(self) -> bool:
        """Report ends of ranks until one of them or node 0 is gone. Return True if node 0 ended the engine."""
        first, since, reported = self._links.nodes[0], dict[int, float](), set[int]()
        waiting = select.poll()
        waiting.register(first, select.POLLIN)
        while True:
            if waiting.poll(1000 * POLL_S):
                with contextlib.suppress(EngineError, OSError):
                    return bool(receive_json(first, HANDSHAKE_TIMEOUT_S).get("over"))
                return False
            for rank, process in self.processes.items():
                code = process.poll()
                stopped = code is None and is_stopped(process.pid)
                begun = since.setdefault(rank, time.monotonic()) if stopped else since.pop(rank, None)
                if stopped and begun is not None and time.monotonic() - begun > STOPPED_TIMEOUT_S:
                    code = -signal.SIGSTOP
                if code is not None and rank not in reported:
                    reported.add(rank)
                    with contextlib.suppress(OSError):
                        send_json(first, {"ended": rank, "code": code})

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self._links.close()


def run_node(first: Address, node: int, host: str, key: str, seconds: float, terms: Terms) -> bool:
    """Run this node's ranks once. Return True if the engine is over; else this node may be needed again."""
    ranks = NodeRanks(join(first, node, host, key, seconds, terms))
    try:
        return ranks.watch()
    finally:
        ranks.end()


# ---- remote ranks, on node 0


class NodeConnection:
    """The connection to another node."""

    def __init__(self, node: int, connection: socket.socket) -> None:
        self.node, self._connection = node, connection
        self._ended: dict[int, int] = {}
        self._gone = False

    def ending(self, rank: int) -> int | None:
        """Return how a rank ended, as its node reported; SIGHUP if the node is gone."""
        while not self._gone and _readable(self._connection):
            try:
                message = receive_json(self._connection, HANDSHAKE_TIMEOUT_S)
                self._ended.setdefault(int(message["ended"]), int(message["code"]))
            except (EngineError, OSError, KeyError, ValueError, TypeError, OverflowError):
                self._gone = True
        return self._ended.get(rank, -signal.SIGHUP if self._gone else None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            send_json(self._connection, {"over": True})
        self._connection.close()


class RemoteProcess:
    """A remote rank with the methods of `subprocess.Popen`."""

    pid = 0  # no process of this machine

    def __init__(self, rank: int, connection: NodeConnection) -> None:
        self.rank, self.connection = rank, connection

    def poll(self) -> int | None:
        return self.connection.ending(self.rank)

    def kill(self) -> None:
        """Do nothing: it ends with its connections."""

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return 0


# ---- inside


def spawn_rank(
    command: Sequence[str],
    control: socket.socket,
    memory: int,
    local: Mapping[int, socket.socket],
    remote: Mapping[int, socket.socket],
    expert_peers: PeerLinks | None = None,
    server: ForkServer | None = None,
) -> ChildProcess:
    """Start the process of a rank. local, remote: its connections to ranks of this node and of others."""
    names = [*map(str, local), *(f"{REMOTE}{rank}" for rank in remote)]
    arguments = [PARENT, "{0}", "{1}", ",".join(f"{name}:{{{i}}}" for i, name in enumerate(names, 2))]
    descriptors = [control.fileno(), memory, *(end.fileno() for end in (*local.values(), *remote.values()))]
    if expert_peers is not None:
        arguments.append(expert_peers.as_option([f"{{{len(descriptors) + i}}}" for i in range(len(expert_peers.descriptors))]))
        descriptors += expert_peers.descriptors
    return spawn(command, arguments, descriptors, server=server, with_thread=True)


def _take_ends(handshakes: HandshakeServer, links: Links, deadline: float, candidates: Candidates | None = None) -> None:
    """Accept the connections of nodes with higher numbers. candidates: on node 0, to handle other connections."""
    above = [rank for ranks in links.ranks[links.node + 1 :] for rank in ranks]
    missing = {(rank, own) for rank in above for own in links.own}
    last = time.monotonic()
    while missing:
        links.check()
        if time.monotonic() > deadline:
            raise EngineError(f"{len(missing)} connections of other nodes are missing")
        if candidates is not None and candidates.any_complete and time.monotonic() - last > PEER_CONNECT_TIMEOUT_S:
            raise _Disconnected(f"{len(missing)} connections are missing after {PEER_CONNECT_TIMEOUT_S:.0f} s")
        admitted = handshakes.next(POLL_S)
        if admitted is None:
            continue
        connection, hello = admitted
        if candidates is not None and candidates.receive(connection, hello):
            continue
        other: Any = hello.get("from")
        own: Any = hello.get("to")
        known = hello.get("meeting") == links.meeting and type(other) is int and type(own) is int
        if not known or (other, own) not in missing:
            _reject(handshakes, connection)
            continue
        missing.remove((other, own))
        last = time.monotonic()
        links.ends.setdefault(own, {})[other] = connection


def _reject(handshakes: HandshakeServer, connection: socket.socket) -> None:
    handshakes.rejections.log("rejected connection on the cluster port: no such rank is expected")
    connection.close()


def _readable(connection: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(0))
