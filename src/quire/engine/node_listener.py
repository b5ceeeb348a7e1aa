"""Engines on other nodes as node 0 has them: what `Child` is to an engine process of this machine.

    NodeListener    listens at data_parallel_address; a `NodeAgent` connects and names its engine (`node_agent.py`)
    RemoteEngine    channel ═ socket pair ═ two threads ═ TCP ═ NodeAgent ═ the engine process

Commands to a remote engine may be sent before its node has connected: they are delivered then. A lost engine is ended on its
node, and the node connects again for the next one.
"""

import contextlib
import logging
import math
import socket
import threading
import time
import weakref
from typing import Protocol

import msgspec

from quire.config.args import EngineArgs
from quire.engine import ipc
from quire.engine.child import EngineConnection, first_frame
from quire.engine.handshake import (
    Address,
    HandshakeServer,
    Hello,
    Terms,
    cluster_key,
    difference,
    keep_alive,
    listen,
    send_json,
)
from quire.files.reading import error_summary, shown
from quire.proc.channel import Channel, Frames
from quire.types.errors import EngineError, QuireError

CHUNK_BYTES = 1 << 16
STOP_TIMEOUT_S = 0.5  # at least, for a node to receive the end
BEGIN_TIMEOUT_S = 15.0  # for a node to start its engine
TAKE_INTERVAL_S = 0.2  # between checks whether a node is still waited for
ACCEPT_RETRY_S = 0.2  # after an error of accept
CHECK_INTERVAL_S = 5.0  # between checks whether the listener is still used; a closed one is noticed at once
CLOCK_TOLERANCE_S = 0.01  # clocks that differ by less count as equal

logger = logging.getLogger(__name__)


class WaitingNode:
    """A node's connection for one engine."""

    def __init__(self, connection: socket.socket, hello: Hello) -> None:
        engine, clock = hello.get("engine"), hello.get("clock")
        if type(engine) is not int or type(clock) is not float or not math.isfinite(clock):
            raise EngineError("invalid message")
        self.connection, self.engine = connection, engine
        self.host = str(connection.getpeername()[0])
        self.clock_offset = time.monotonic() - clock  # our clock minus the node's

    @property
    def waits(self) -> bool:
        """Whether it is connected and silent: node 0 sends first."""
        try:
            self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class EngineNodes(Protocol):
    """The nodes of engines that are not on this machine."""

    def wait(self, engine: int, over: threading.Event) -> WaitingNode | None:
        """Wait for a node with this engine. None: `over` was set. Raises QuireError if no node will come."""

    def absence(self, engine: int) -> str:
        """Return why an engine has no node, for an error message."""

    def close(self) -> None: ...


class NodeListener:
    """Accept nodes with engines. The newest connection of each engine waits until it is used."""

    def __init__(self, address: Address, engines: range, terms: Terms, key: str | None = None) -> None:
        """key: what nodes must know; default: QUIRE_CLUSTER_KEY."""
        self._engines, self._terms = engines, terms
        self._listener = listen(address, ("data_parallel_address", "data_parallel_rpc_port"))
        self.address: Address = (address[0], self._listener.getsockname()[1])
        handshakes = HandshakeServer(self._listener, cluster_key() if key is None else key)
        self._rejections = handshakes.rejections
        self._changed = threading.Condition()
        self._waiting: dict[int, WaitingNode] = {}
        self._finalizer = weakref.finalize(self, _close, self._listener, self._waiting)
        threading.Thread(target=_receive, args=(weakref.ref(self), handshakes), name="quire-node-listener", daemon=True).start()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def admit(self, connection: socket.socket, hello: Hello) -> None:
        try:
            arrived = WaitingNode(connection, hello)
            engine = arrived.engine
            refusal = difference(self._terms, hello)
            if engine not in self._engines:
                refusal = (
                    f"engine {shown(engine)} is not one of those of other nodes, "
                    f"{self._engines.start} to {self._engines.stop - 1}"
                )
            if refusal is not None:
                self._rejections.log(
                    "rejected node %s with engine %s: %s", arrived.host, shown(engine), refusal, level=logging.ERROR
                )
                send_json(connection, {"refused": refusal})
                connection.close()
                return
            send_json(connection, {"engine": engine})
            keep_alive(connection)
        except (OSError, EngineError) as error:
            self._rejections.log("rejected connection on the cluster port: %s", error)
            connection.close()
            return
        with self._changed:
            before: WaitingNode | None = arrived  # to be closed
            if self._finalizer.alive:
                before, self._waiting[engine] = self._waiting.get(engine), arrived
                self._changed.notify_all()
        if before is not None:
            before.connection.close()

    def wait(self, engine: int, over: threading.Event) -> WaitingNode | None:
        while not over.is_set():
            if (arrived := self.take(engine)) is not None:
                return arrived
        return None

    def take(self, engine: int) -> WaitingNode | None:
        """Return a node with this engine; None: no node within TAKE_INTERVAL_S."""
        with self._changed:
            self._changed.wait_for(lambda: engine in self._waiting, TAKE_INTERVAL_S)
            arrived = self._waiting.pop(engine, None)
        if arrived is None or arrived.waits:
            return arrived
        logger.warning("node %s with engine %d disconnected while it waited", arrived.host, engine)
        arrived.connection.close()
        return None

    def absence(self, engine: int) -> str:
        return f"no node connected to {self.address[0]}:{self.address[1]} with engine {engine}"

    def close(self) -> None:
        with self._changed:
            self._finalizer()


class RemoteEngine(EngineConnection):
    """One process of an engine on another node. `engine` is its number, of args.data_parallel_size."""

    def __init__(self, args: EngineArgs, nodes: EngineNodes, engine: int, serving: bool = True) -> None:
        start = first_frame(args, engine, serving)
        ours, theirs = socket.socketpair()
        self._channel, self._engine, self._nodes = Channel(ours, ipc.MAX_FIRST_MESSAGE_BYTES), engine, nodes
        self._relay = _Relay(nodes, engine, theirs)
        self._begun: ipc.Begun | None = None
        self._ended: ipc.Ended | None = None
        self._fault = ""  # why its reports are not read any more
        self._finalizer = weakref.finalize(self, _disconnect, self._channel, self._relay)
        try:
            threading.Thread(target=self._relay.run, name=f"quire-engine-{engine}", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self._finalizer()
            raise OSError(str(error)) from None
        self._channel.send(start)

    @property
    def pid(self) -> int:
        """Its pid on its node; 0 until the node has reported it."""
        return 0 if self._begun is None else self._begun.pid

    @property
    def waits(self) -> bool:
        """Whether no node has connected yet."""
        return not self._relay.host

    @property
    def stopped(self) -> bool:
        """False: its node checks that."""
        return False

    def receive(self) -> ipc.Report | None:
        """Return the next report, None if there is none now. Reports of the node itself are handled here."""
        if (absent := self._relay.take_error()) is not None:
            return ipc.Failed(type(absent).__name__, str(absent))
        while not self._fault and (frame := self._channel.receive()) is not None:
            try:
                report = ipc.decode_report(frame)
            except Exception as error:  # the peer may send anything
                self._abandon(f"invalid message ({error_summary(error)})")
                break
            if self._begun is None and not isinstance(report, ipc.Begun):
                self._abandon(f"{type(report).__name__} before the engine had begun")
                break
            match report:
                case ipc.Begun() as begun:
                    self._begun = begun
                    self._channel.allow(ipc.MAX_MESSAGE_BYTES)
                    logger.info("engine %d is process %d on %s", self._engine, self.pid, self._relay.host)
                case ipc.Ended() as ended:
                    self._ended = ended
                case report:
                    return _by_our_clock(report, self._relay.clock_offset)
        if self._channel.fault and not self._fault:
            self._abandon(self._channel.fault)
        return None

    def _abandon(self, fault: str) -> None:
        self._fault = fault
        self._channel.closed = True
        self._relay.end()

    def ending(self) -> str | None:
        since = self._relay.since
        if (
            since is not None
            and self._begun is None
            and time.monotonic() - since > BEGIN_TIMEOUT_S
            and not self._relay.over.is_set()
        ):
            self._abandon(f"it did not begin within {BEGIN_TIMEOUT_S:.0f} s")
        if not self._relay.over.is_set():
            return None
        if self._ended is None and not self.closed:
            self.receive()
        if self._ended is not None:
            return f"{self._ended.how} (on {self._relay.host})"
        if self._fault:
            return f"a fault of its node ({self._relay.host}): {self._fault}"
        return f"the connection to its node ({self._relay.host})" if self._relay.host else "no node"

    @property
    def never_began(self) -> bool:
        """Whether the peer was no node, or left before its engine began."""
        return bool(self._fault) or (bool(self._relay.host) and self._relay.over.is_set() and self._begun is None)

    def log_tail(self) -> str:
        if not self._relay.host:
            return f"\n  {self._nodes.absence(self._engine)}"
        return "" if self._ended is None else "".join(f"\n  {line}" for line in self._ended.lines)

    def in_flight(self) -> set[str]:
        """Return the running requests; none if the node is gone without a report."""
        return set() if self._ended is None else set(self._ended.in_flight)

    def kill(self) -> None:
        self._relay.end()

    def stop(self, timeout: float) -> None:
        """End the engine for good: its node need not connect again."""
        if self._relay.host and not self._relay.over.is_set():
            self.send(ipc.Stop())
            self._channel.drain(max(timeout, STOP_TIMEOUT_S))
            self._relay.over.wait(max(timeout, STOP_TIMEOUT_S))
        self.close()

    def close(self) -> None:
        self._finalizer()


class _Relay:
    """Two threads that copy bytes between the channel and the node, once that has connected."""

    def __init__(self, nodes: EngineNodes, engine: int, inner: socket.socket) -> None:
        self._nodes, self._engine, self._inner = nodes, engine, inner
        self._outer: socket.socket | None = None
        self._error: QuireError | None = None  # why no node will come
        self.over = threading.Event()
        self.host, self.clock_offset = "", 0.0
        self.since: float | None = None  # when the node connected

    def run(self) -> None:
        arrived = None
        try:
            arrived = self._nodes.wait(self._engine, self.over)
        except QuireError as error:
            self._error = error
        if arrived is None:
            self._inner.close()
            return
        self.host, self.clock_offset, self._outer = arrived.host, arrived.clock_offset, arrived.connection
        self.since = time.monotonic()
        if self.over.is_set():
            self.end()
        back = threading.Thread(target=self._relay_reports, name=f"quire-engine-{self._engine}-reports", daemon=True)
        back.start()
        _copy(self._inner, self._outer)
        with contextlib.suppress(OSError):
            self._outer.shutdown(socket.SHUT_WR)
        back.join()
        self._inner.close()
        self._outer.close()

    def _relay_reports(self) -> None:
        """Copy reports until the node has closed its connection."""
        assert self._outer is not None
        _copy(self._outer, self._inner)
        self.over.set()
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RDWR)

    def take_error(self) -> QuireError | None:
        """Return once why no node will come."""
        error, self._error = self._error, None
        return error

    def end(self) -> None:
        self.over.set()
        if self._outer is not None:
            with contextlib.suppress(OSError):
                self._outer.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copy bytes until either is closed."""
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            sink.sendall(chunk)


def _by_our_clock(report: ipc.Report, clock_offset: float) -> ipc.Report:
    """Convert times from the node's clock, which started with its machine."""
    if abs(clock_offset) < CLOCK_TOLERANCE_S:
        return report
    match report:
        case ipc.StepReport(deltas):
            report.deltas = [
                msgspec.structs.replace(delta, scheduled_at=delta.scheduled_at + clock_offset) if delta.scheduled_at else delta
                for delta in deltas
            ]
        case ipc.Seen(snapshot):
            snapshot.t += clock_offset
            for request in snapshot.requests:
                request.since += clock_offset
                request.seen += clock_offset
    return report


def _receive(node_listener: "weakref.ref[NodeListener]", handshakes: HandshakeServer) -> None:
    with contextlib.closing(handshakes):
        while True:
            came, fault = None, ""
            try:
                came = handshakes.next(CHECK_INTERVAL_S)
            except (OSError, ValueError) as error:  # ValueError: the listener is closed
                fault = str(error)
            owner = node_listener()
            if owner is None or owner.closed:
                if came is not None:
                    came[0].close()
                return
            if came is not None:
                try:
                    owner.admit(*came)
                except Exception:  # go on with the next node
                    came[0].close()
                    logger.exception("handling the message of a node failed")
            del owner
            if fault:
                handshakes.rejections.log("nodes cannot connect for the moment: %s", fault)
                time.sleep(ACCEPT_RETRY_S)


def _close(listener: socket.socket, waiting: dict[int, WaitingNode]) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # accept returns in other threads
    listener.close()
    for arrived in waiting.values():
        with arrived.connection, contextlib.suppress(OSError):
            Frames(arrived.connection).send(ipc.encode(ipc.Stop()))


def _disconnect(channel: Channel, relay: _Relay) -> None:
    relay.end()
    channel.close()
