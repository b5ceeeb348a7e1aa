"""Engines on other nodes, as node 0 has them: what `Child` is to an engine process of this machine.

    NodeListener    listens at data_parallel_address; a `NodeAgent` connects and names its engine (`node_agent.py`)
    RemoteEngine    channel ═ a pair of sockets ═ two threads ═ TCP ═ NodeAgent ═ the engine process

Commands to a remote engine may be sent before its node has connected: they are delivered then. A lost engine is ended at its
node, and the node connects again for the next one.
"""

import contextlib
import logging
import math
import socket
import threading
import time
import weakref

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
from quire.files.reading import shown, told
from quire.proc.channel import Channel, Frames
from quire.types.errors import EngineError

PIECE = 1 << 16
GOODBYE = 0.5  # seconds, at least, for a node to hear that it is over
BEGIN = 15.0  # seconds for a node to say that it has begun to start its engine
AGAIN = 0.2  # seconds after which we try again to accept
LOOK = 5.0  # seconds between looks whether the node_listener is still wanted; a closed one is noticed at once
CLOCKS = 0.01  # seconds by which clocks may differ and count as one

logger = logging.getLogger(__name__)


class Arrived:
    """A node's connection for one engine."""

    def __init__(self, connection: socket.socket, said: Hello) -> None:
        engine, clock = said.get("engine"), said.get("clock")
        if type(engine) is not int or type(clock) is not float or not math.isfinite(clock):
            raise EngineError("it said what no node says")
        self.connection, self.engine = connection, engine
        self.host = str(connection.getpeername()[0])
        self.ahead = time.monotonic() - clock  # our clock, compared with the node's

    @property
    def waits(self) -> bool:
        """It is there, and has said nothing: a node is told something first."""
        try:
            self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class NodeListener:
    """Where nodes with engines connect. Each engine's newest connection waits here until it is wanted."""

    def __init__(self, address: Address, engines: range, terms: Terms) -> None:
        self.address, self._engines, self._terms = address, engines, terms
        self._listener = listen(address)
        handshakes = HandshakeServer(self._listener, cluster_key())
        self._rejections = handshakes.rejections
        self._news = threading.Condition()
        self._waiting: dict[int, Arrived] = {}
        self._finalizer = weakref.finalize(self, _close, self._listener, self._waiting)
        threading.Thread(target=_receive, args=(weakref.ref(self), handshakes), name="quire-node_listener", daemon=True).start()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def welcome(self, connection: socket.socket, said: Hello) -> None:
        try:
            arrived = Arrived(connection, said)
            engine = arrived.engine
            refusal = difference(self._terms, said)
            if engine not in self._engines:
                refusal = (
                    f"engine {shown(engine)} is not one of those of other nodes, "
                    f"{self._engines.start} to {self._engines.stop - 1}"
                )
            if refusal is not None:
                self._rejections.log(
                    "the node %s with engine %s is refused: %s", arrived.host, shown(engine), refusal, level=logging.ERROR
                )
                send_json(connection, {"refused": refusal})
                connection.close()
                return
            send_json(connection, {"engine": engine})
            keep_alive(connection)
        except (OSError, EngineError) as error:
            self._rejections.log("one who connected as a node is not one: %s", error)
            connection.close()
            return
        with self._news:
            before: Arrived | None = arrived  # of no use any more
            if self._finalizer.alive:
                before, self._waiting[engine] = self._waiting.get(engine), arrived
                self._news.notify_all()
        if before is not None:
            before.connection.close()

    def wait(self, engine: int, over: threading.Event) -> Arrived | None:
        """For a node with this engine; None: it is over, and not wanted any more."""
        with self._news:
            while not over.is_set():
                arrived = self._waiting.pop(engine, None)
                if arrived is not None and arrived.waits:
                    return arrived
                if arrived is not None:
                    logger.warning("the node %s with engine %d has gone while it waited", arrived.host, engine)
                    arrived.connection.close()
                self._news.wait(0.2)
        return None

    def close(self) -> None:
        with self._news:
            self._finalizer()


class RemoteEngine(EngineConnection):
    """One life of an engine on another node. `engine` is its number, of args.data_parallel_size."""

    def __init__(self, args: EngineArgs, node_listener: NodeListener, engine: int, serving: bool = True) -> None:
        start = first_frame(args, engine, serving)
        ours, theirs = socket.socketpair()
        self._channel, self._engine, self._node_listener = Channel(ours, ipc.MAX_FIRST_MESSAGE_BYTES), engine, node_listener
        self._line = _Line(node_listener, engine, theirs)
        self._begun: ipc.Begun | None = None
        self._ended: ipc.Ended | None = None
        self._fault = ""  # why we listen no more
        self._finalizer = weakref.finalize(self, _hang_up, self._channel, self._line)
        try:
            threading.Thread(target=self._line.run, name=f"quire-engine-{engine}", daemon=True).start()
        except RuntimeError as error:  # the system gives no thread
            self._finalizer()
            raise OSError(str(error)) from None
        self._channel.send(start)

    @property
    def pid(self) -> int:
        """On its node; 0 until that has told."""
        return 0 if self._begun is None else self._begun.pid

    @property
    def stopped(self) -> bool:
        """Its node looks at that."""
        return False

    def receive(self) -> ipc.Report | None:
        """The next report, None if there is none now. What the node itself says is heard here."""
        while not self._fault and (frame := self._channel.receive()) is not None:
            try:
                said = ipc.decode_report(frame)
            except Exception as error:  # whatever it was: bytes of a stranger are no mistake of ours
                self._abandon(f"it said what no engine says ({told(error)})")
                break
            if self._begun is None and not isinstance(said, ipc.Begun):
                self._abandon(f"it said {type(said).__name__} before it had begun")
                break
            match said:
                case ipc.Begun() as begun:
                    self._begun = begun
                    self._channel.allow(ipc.MAX_MESSAGE_BYTES)
                    logger.info("engine %d is process %d on %s", self._engine, self.pid, self._line.host)
                case ipc.Ended() as ended:
                    self._ended = ended
                case report:
                    return _by_our_clock(report, self._line.ahead)
        if self._channel.fault and not self._fault:
            self._abandon(self._channel.fault)
        return None

    def _abandon(self, fault: str) -> None:
        self._fault = fault
        self._channel.closed = True
        self._line.end()

    def ending(self) -> str | None:
        since = self._line.since
        if since is not None and self._begun is None and time.monotonic() - since > BEGIN and not self._line.over.is_set():
            self._abandon(f"it did not begin within {BEGIN:.0f} s")
        if not self._line.over.is_set():
            return None
        if self._ended is None and not self.closed:
            self.receive()
        if self._ended is not None:
            return f"{self._ended.how} (on {self._line.host})"
        if self._fault:
            return f"a fault of its node ({self._line.host}): {self._fault}"
        return f"the connection to its node ({self._line.host})" if self._line.host else "no node"

    @property
    def strange(self) -> bool:
        """Was that no engine's end, but somebody's who is none, or who left before its engine began?"""
        return bool(self._fault) or (bool(self._line.host) and self._line.over.is_set() and self._begun is None)

    def last_words(self) -> str:
        if not self._line.host:
            host, port = self._node_listener.address
            return f"\n  no node connected to {host}:{port} with engine {self._engine}"
        return "" if self._ended is None else "".join(f"\n  {line}" for line in self._ended.lines)

    def in_flight(self) -> set[str]:
        """Of a node that is gone without a word: nobody is suspected."""
        return set() if self._ended is None else set(self._ended.in_flight)

    def kill(self) -> None:
        self._line.end()

    def stop(self, timeout: float) -> None:
        """For good: its node need not come again."""
        if self._line.host and not self._line.over.is_set():
            self.send(ipc.Stop())
            self._channel.drain(max(timeout, GOODBYE))
            self._line.over.wait(max(timeout, GOODBYE))
        self.close()

    def close(self) -> None:
        self._finalizer()


class _Line:
    """Two threads that carry bytes between the channel and the node, once that has come."""

    def __init__(self, node_listener: NodeListener, engine: int, inner: socket.socket) -> None:
        self._node_listener, self._engine, self._inner = node_listener, engine, inner
        self._outer: socket.socket | None = None
        self.over = threading.Event()
        self.host, self.ahead = "", 0.0
        self.since: float | None = None  # when the node came

    def run(self) -> None:
        arrived = self._node_listener.wait(self._engine, self.over)
        if arrived is None:
            self._inner.close()
            return
        self.host, self.ahead, self._outer = arrived.host, arrived.ahead, arrived.connection
        self.since = time.monotonic()
        if self.over.is_set():
            self.end()
        back = threading.Thread(target=self._carry_back, name=f"quire-engine-{self._engine}-reports", daemon=True)
        back.start()
        _carry(self._inner, self._outer)
        with contextlib.suppress(OSError):
            self._outer.shutdown(socket.SHUT_WR)
        back.join()
        self._inner.close()
        self._outer.close()

    def _carry_back(self) -> None:
        """When the node says no more, it is over."""
        assert self._outer is not None
        _carry(self._outer, self._inner)
        self.over.set()
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self.over.set()
        if self._outer is not None:
            with contextlib.suppress(OSError):
                self._outer.shutdown(socket.SHUT_RDWR)


def _carry(source: socket.socket, sink: socket.socket) -> None:
    """Until either is closed."""
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            sink.sendall(piece)


def _by_our_clock(report: ipc.Report, ahead: float) -> ipc.Report:
    """Times are told by the node's clock, which began when that machine did."""
    if abs(ahead) < CLOCKS:
        return report
    match report:
        case ipc.StepReport(deltas):
            report.deltas = [
                msgspec.structs.replace(delta, scheduled_at=delta.scheduled_at + ahead) if delta.scheduled_at else delta
                for delta in deltas
            ]
        case ipc.Seen(snapshot):
            snapshot.t += ahead
            for request in snapshot.requests:
                request.since += ahead
                request.seen += ahead
    return report


def _receive(node_listener: "weakref.ref[NodeListener]", handshakes: HandshakeServer) -> None:
    with contextlib.closing(handshakes):
        while True:
            came, fault = None, ""
            try:
                came = handshakes.next(LOOK)
            except (OSError, ValueError) as error:  # ValueError: the listener is closed
                fault = str(error)
            there = node_listener()
            if there is None or there.closed:
                if came is not None:
                    came[0].close()
                return
            if came is not None:
                try:
                    there.welcome(*came)
                except Exception:  # the next one is to be heard
                    came[0].close()
                    logger.exception("what a node said could not be understood")
            del there
            if fault:
                handshakes.rejections.log("nodes cannot connect now, and will be able to later: %s", fault)
                time.sleep(AGAIN)


def _close(listener: socket.socket, waiting: dict[int, Arrived]) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # whoever waits in accept returns
    listener.close()
    for arrived in waiting.values():
        with arrived.connection, contextlib.suppress(OSError):
            Frames(arrived.connection).send(ipc.encode(ipc.Stop()))


def _hang_up(channel: Channel, line: _Line) -> None:
    line.end()
    channel.close()
