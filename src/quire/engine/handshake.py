"""The handshake between machines (nodes) over TCP, and the terms that they must have in common.

    HandshakeServer    accept ─► a hello in time, with the right key ──► admitted: the connection and the hello
                             └─► anything else, or silence ────────────► closed

A node identifies itself in one JSON message. A peer that knows the key (QUIRE_CLUSTER_KEY; none by default) is admitted: run
nodes in a network that others cannot reach. Nothing received is ever executed or unpickled. At most MAX_SILENT_CONNECTIONS
may be silent: one more closes the connection that has been silent for longest, and its node may connect again.

Machine 0's arguments apply everywhere. A machine whose version, model files or arguments differ is refused, and both machines
log what differs. This holds for engines that serve the same model and for ranks of one engine.
"""

import contextlib
import errno
import hmac
import json
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from quire import __version__
from quire.config.args import EngineArgs
from quire.config.fields import FLOAT_NAMES
from quire.config.resolve import find_files, wants_weights
from quire.files.identity import WEIGHTS, identity
from quire.files.reading import shown
from quire.types.errors import EngineError, ModelError

ARGUMENTS = (
    "dtype", "quantization", "kv_cache_dtype", "max_model_len", "load_format", "model_impl", "hf_overrides", "seed"
)  # fmt: skip
Terms = dict[str, Any]  # JSON: version, files (name -> digest), arguments, and model: the path of the files on that machine
KEY = "QUIRE_CLUSTER_KEY"
MAX_HELLO_BYTES = 1 << 16
HANDSHAKE_TIMEOUT_S = 10.0
RECONNECT_INTERVAL_S = 0.1
MAX_SILENT_CONNECTIONS = 64
MAX_LOG_LINES, LOG_WINDOW_S = 32, 60.0  # lines about rejected connections in a window
PROBE_AFTER_S, PROBE_EVERY_S, UNANSWERED_PROBES = 5, 2, 3  # of an idle connection: its peer is lost within 11 s
UNACKNOWLEDGED_S = 10  # how long a peer may leave data or probes unacknowledged
LENGTH = struct.Struct("<I")  # of the message that follows
Address = tuple[str, int]
Hello = dict[str, Any]

logger = logging.getLogger(__name__)


def terms_of(args: EngineArgs) -> Terms:
    """Return machine 0's terms."""
    return _terms(args, wants_weights(args), ARGUMENTS)


def own_terms(args: EngineArgs) -> Terms:
    """Return another machine's terms, with the arguments that were given. Machine 0 knows whether weights are needed."""
    given = [name for name in ARGUMENTS if getattr(args, name) != _default(name)]
    try:
        return _terms(args, wants_weights(args), given)
    except ModelError:
        return _terms(args, False, given)


def difference(ours: Terms, theirs: Terms) -> str | None:
    """Return what another machine has to change, or None."""
    if theirs.get("version") != ours["version"]:
        return f"its Quire is {shown(theirs.get('version'))}, machine 0's is {ours['version']}"
    if found := different_file(ours["files"], _object(theirs, "files")):
        return f"its model is not machine 0's: {found}"
    for name, value in _object(theirs, "arguments").items():
        if name in ours["arguments"] and value != ours["arguments"][name]:
            return f"its {name} is {shown(value)}, machine 0's is {shown(ours['arguments'][name])}; remove it on that machine"
    return None


def different_file(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> str | None:
    """Return the first file that differs, and how. Weights that machine 0 does not read are not compared."""
    for name in sorted({*ours, *theirs}):
        if ours.get(name) == theirs.get(name) or (name == WEIGHTS and name not in ours):
            continue
        how = "is missing" if name not in theirs else "should not be there" if name not in ours else "is another one"
        return f"{shown(name)} {how}"
    return None


def _terms(args: EngineArgs, weights: bool, names: "tuple[str, ...] | list[str]") -> Terms:
    files = find_files(args, weights)
    arguments = {name: getattr(args, name) for name in names}
    if "dtype" in arguments:
        arguments["dtype"] = FLOAT_NAMES.get(args.dtype, args.dtype)
    terms = {"version": __version__, "files": identity(files), "arguments": arguments, "model": str(files.path.absolute())}
    return dict(json.loads(json.dumps(terms, default=repr)))


def _default(name: str) -> Any:
    [field] = [field for field in fields(EngineArgs) if field.name == name]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _object(theirs: Terms, name: str) -> dict[str, Any]:
    found = theirs.get(name)
    return found if isinstance(found, dict) else {}


class HungUp(EngineError):
    """The other end of a connection was closed."""


def cluster_key() -> str:
    return os.environ.get(KEY, "")


def listen(address: Address, names: tuple[str, str] | None = None) -> socket.socket:
    """Listen for other nodes. names: the arguments that chose address and port, for the error."""
    try:
        return socket.create_server(address, backlog=1024, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError as error:
        change = ""
        if names is not None and error.errno == errno.EADDRINUSE:
            change = f". End the process that has this port, or choose another {names[1]} on all machines"
        elif names is not None:
            change = f". {names[0]} must be an address of this machine, and {names[1]} a port that this user may open"
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise EngineError(f"cannot listen on {address[0]}, port {address[1]}, for other nodes: {reason}{change}") from None


def address_towards(first: Address) -> str:
    """Return the address by which other nodes reach this one: that of the route to node 0."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(*first, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"machine 0's address {first[0]!r} cannot be used from this machine: {error.strerror or error}. Give an address or "
            "name of machine 0 that this machine can reach"
        ) from None


def connect(address: Address, deadline: float, check: Callable[[], None] = lambda: None, change: str = "") -> socket.socket:
    """Connect, trying again until the deadline.

    check: raises when the connection is no longer needed.
    change: what to change if it fails, for the error.
    """
    while True:
        check()
        try:
            made = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(f"{address[0]}, port {address[1]}, cannot be reached: {error}{change}") from None
            time.sleep(RECONNECT_INTERVAL_S)
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


def send_json(connection: socket.socket, what: Mapping[str, Any]) -> None:
    data = json.dumps(what).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_json(connection: socket.socket, seconds: float) -> Hello:
    """Return one message. Bytes after it stay in the socket for the next reader."""
    deadline = time.monotonic() + seconds
    try:
        (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size, deadline))
        if size > MAX_HELLO_BYTES:
            raise EngineError("the peer sent an invalid message")
        return parse(_exactly(connection, size, deadline))
    except TimeoutError as error:
        if error.errno is not None:  # from the system, which `probe` or `keep_alive` asked to watch the peer
            raise HungUp("the peer has vanished") from None
        raise EngineError(f"the peer sent nothing within {seconds:.0f} s") from None
    finally:
        connection.settimeout(None)


def parse(data: bytes | bytearray) -> Hello:
    try:
        hello = json.loads(data)
    except (ValueError, RecursionError):
        raise EngineError("the peer sent an invalid message") from None
    if not isinstance(hello, dict):
        raise EngineError("the peer sent an invalid message")
    return hello


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise HungUp("the peer closed the connection")
        data += chunk
    return data


class RejectionLog:
    """Logs rejected connections: the first MAX_LOG_LINES of a window, then their number."""

    def __init__(self) -> None:
        self._since, self._logged, self._more = time.monotonic(), 0, 0

    def log(self, message: str, *values: object, level: int = logging.WARNING) -> None:
        now = time.monotonic()
        if now - self._since > LOG_WINDOW_S:
            if self._more:
                logger.warning("%d more rejected connections on the cluster port", self._more)
            self._since, self._logged, self._more = now, 0, 0
        self._logged += 1
        if self._logged <= MAX_LOG_LINES:
            logger.log(level, message, *values)
        else:
            self._more += 1


class HandshakeServer:
    """Admits nodes that connect to a listener, which stays its owner's. All connections are read by the calling thread."""

    def __init__(self, listener: socket.socket, key: str) -> None:
        listener.setblocking(False)
        self._listener, self._key = listener, key.encode()
        self._silent: dict[int, _Pending] = {}  # by descriptor, oldest first
        self.rejections = RejectionLog()

    def next(self, seconds: float) -> tuple[socket.socket, Hello] | None:
        """Return the next node that is admitted, and its hello; None: no node in this time. OSError: the listener fails."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for pending in [one for one in self._silent.values() if one.until < now]:
                self._drop(pending, f"no handshake within {HANDSHAKE_TIMEOUT_S:.0f} s")
            until = min([deadline, *(one.until for one in self._silent.values())])
            ready = self._poll(max(0.0, until - now))
            for descriptor in [one for one in self._silent if one in ready]:
                if (hello := self._read_hello(self._silent[descriptor])) is not None:
                    return self._silent.pop(descriptor).admit(), hello
            if self._listener.fileno() in ready:
                self._accept()
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        for pending in self._silent.values():
            pending.connection.close()
        self._silent.clear()

    def _poll(self, seconds: float) -> set[int]:
        waiting = select.poll()  # unlike epoll it needs no descriptor, of which there may be none left
        for descriptor in (self._listener.fileno(), *self._silent):
            waiting.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in waiting.poll(1000 * seconds)}

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has closed it already
            return
        self._silent[connection.fileno()] = _Pending(connection)
        if len(self._silent) > MAX_SILENT_CONNECTIONS:
            self._drop(
                next(iter(self._silent.values())),
                f"no handshake, and {MAX_SILENT_CONNECTIONS} newer connections are silent, too",
            )

    def _read_hello(self, pending: "_Pending") -> Hello | None:
        """Return its hello; None: not complete, or the connection was rejected."""
        try:
            hello = pending.receive()
            if hello is None or hmac.compare_digest(str(hello.get("key", "")).encode(errors="replace"), self._key):
                return hello
            self.rejections.log("rejected node: its key (%s) differs", KEY)
            send_json(pending.connection, {"refused": f"the key ({KEY}) differs"})
        except (EngineError, OSError) as error:
            self._drop(pending, str(error))
        else:
            del self._silent[pending.connection.fileno()]
            pending.connection.close()
        return None

    def _drop(self, pending: "_Pending", why: str) -> None:
        self.rejections.log("rejected connection on the cluster port: %s", why)
        del self._silent[pending.connection.fileno()]
        pending.connection.close()


class _Pending:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.until = connection, time.monotonic() + HANDSHAKE_TIMEOUT_S
        self._data, self._expected_bytes = bytearray(), LENGTH.size

    def receive(self) -> Hello | None:
        """Return the hello once it is complete. Bytes after it stay in the socket for the next reader."""
        while len(self._data) < self._expected_bytes:
            try:
                chunk = self.connection.recv(self._expected_bytes - len(self._data))
            except BlockingIOError:
                return None
            if not chunk:
                raise HungUp("the peer closed the connection")
            self._data += chunk
            if len(self._data) == LENGTH.size:
                (size,) = LENGTH.unpack(self._data)
                if size > MAX_HELLO_BYTES:
                    raise EngineError("the peer sent an invalid message")
                self._expected_bytes += size
        return parse(self._data[LENGTH.size :])

    def admit(self) -> socket.socket:
        self.connection.setblocking(True)
        probe(self.connection)
        return self.connection
