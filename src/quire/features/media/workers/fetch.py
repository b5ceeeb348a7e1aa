"""Copy the content of a URL into a private file, in a media process.

https goes to allowed hosts only, and to public addresses only. A host that was allowed as "host:port" may have any address, and
http may go there. The address that was checked is the one that is connected to, so a name cannot change its address in between.
Redirects are checked again. Files are read below one directory. No error names an address or a path.

A download may take `seconds`. After `patience` it goes on only if it will end in that time at its average rate, which requires
a declared length: a slow or endless stream is refused early.
"""

import contextlib
import errno
import hashlib
import http.client
import ipaddress
import os
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from quire.features.media.store import open_for_writing
from quire.features.media.workers import wire
from quire.types.errors import FetchFailed, InvalidParameter, RequestError

MAX_REDIRECTS = 5
CHUNK_BYTES = 1 << 16
STALL_TIMEOUT_S = 1.0  # without a byte, after which a download is refused as too slow
CHECK_INTERVAL_S = 0.25  # between two checks of a download
ANY_HOST = "*"
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class _Late(BaseException):
    """The deadline has passed. Not an Exception: nothing may catch it by accident."""


def fetch(job: wire.Fetch) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of the content."""
    try:
        with open_for_writing(job.out) as out:
            copy = _Copy(out, job.most)
            with _deadline(copy, job.seconds, job.patience):
                parts = check_url(job.url, job.domains, job.root)
                return _copy_file(parts, job.root, copy) if parts.scheme == "file" else _copy_remote(job, parts, copy)
    except _Late:
        raise FetchFailed("it cannot be fetched: its server is too slow") from None
    except RequestError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:  # no message of these: they have addresses and paths
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise FetchFailed("it cannot be fetched: the server has no room for it in shared memory. Try again later") from None
        reason = "its certificate is not valid" if isinstance(error, ssl.SSLCertVerificationError) else "the connection failed"
        reason = "the file cannot be read" if job.url[:5].lower() == "file:" else reason
        raise FetchFailed(f"it cannot be fetched: {reason}") from None


class _Copy:
    """Write chunks to a file, within a limit."""

    def __init__(self, out: IO[bytes], most: int) -> None:
        self._out, self._most, self._size, self._hash = out, most, 0, hashlib.sha256()
        self._declared = 0  # bytes; 0: not known
        self._grown = 0.0  # when the last chunk came

    def all_of(self, source: Any, declared: int | None) -> tuple[int, str]:
        """Copy the source. declared: its length, if it is known"""
        self._refuse_more(declared or 0)
        self._declared = declared or 0
        while chunk := source.read1(CHUNK_BYTES):
            self._size, self._grown = self._size + len(chunk), time.monotonic()
            self._refuse_more(self._size)
            self._hash.update(chunk)
            self._out.write(chunk)
        if self._size < self._declared:
            raise FetchFailed("it cannot be fetched: its server ended too early")
        return self._size, self._hash.hexdigest()

    def on_its_way(self, begun: float, seconds: float) -> bool:
        """Return whether the copy will end within `seconds` of its beginning if it goes on in the same way."""
        now = time.monotonic()
        share = self._size / self._declared if self._declared else 0.0
        return now - self._grown < STALL_TIMEOUT_S and now - begun < seconds * share

    def _refuse_more(self, size: int) -> None:
        if size > self._most:
            raise InvalidParameter(f"it has more than {self._most} bytes. Send a smaller one")


@contextmanager
def _deadline(copy: _Copy, seconds: float, patience: float) -> Iterator[None]:
    """Interrupt what is inside when it takes too long: a server that sends a byte now and then would never time out."""
    begun = time.monotonic()

    def check(number: int, frame: Any) -> None:  # noqa: ARG001
        if time.monotonic() - begun >= seconds or not copy.on_its_way(begun, seconds):
            raise _Late

    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, patience), CHECK_INTERVAL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_url(url: str, domains: Collection[str], root: str) -> SplitResult:
    """Raise an error for a URL that is not allowed; return its parts."""
    parts = _split(url)
    if parts.scheme != "file":
        _check_host(parts, domains)
    elif not root:
        raise InvalidParameter("file: URLs are not allowed here. Start Quire with --allowed-local-media-path DIR")
    elif parts.netloc not in ("", "localhost"):
        raise InvalidParameter("a file: URL must not name a host")
    return parts


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port, url.encode()
    except ValueError:
        raise InvalidParameter("its URL is not valid") from None
    if parts.scheme not in ("http", "https", "file"):
        raise InvalidParameter(
            "its URL must begin with data:, https:, http: or file:. Send base64 as data:image/png;base64,..."
        )
    return parts


# ---- files


def _copy_file(parts: SplitResult, root: str, copy: _Copy) -> tuple[int, str]:
    allowed = os.path.realpath(root)
    wanted = os.path.realpath(unquote(parts.path))
    if not _is_below(wanted, allowed):
        raise InvalidParameter("its file is not below --allowed-local-media-path")
    descriptor = os.open(wanted, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as source:
        opened = f"/proc/self/fd/{descriptor}"  # a directory may have become a link after the check
        if Path(opened).exists() and not _is_below(os.readlink(opened), allowed):  # noqa: PTH115 it is a magic link
            raise InvalidParameter("its file is not below --allowed-local-media-path")
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidParameter("its file is not a regular file")
        return copy.all_of(source, facts.st_size)


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root and path != root


# ---- http


def _copy_remote(job: wire.Fetch, parts: SplitResult, copy: _Copy) -> tuple[int, str]:
    url = job.url
    for _ in range(MAX_REDIRECTS + 1):
        with _get(parts, job.domains, job.seconds) as answer:
            if answer.status in (301, 302, 303, 307, 308):
                url = _redirected(url, answer.headers.get("location", ""), job.domains)
                parts = _split(url)
                continue
            if answer.status != 200:
                raise FetchFailed(f"it cannot be fetched: its server answered {answer.status}")
            if answer.headers.get("content-encoding", "identity").lower() != "identity":
                raise FetchFailed("it cannot be fetched: its server sent it compressed")
            return copy.all_of(answer, answer.length)
    raise FetchFailed(f"it cannot be fetched: its server redirected more than {MAX_REDIRECTS} times")


def _redirected(url: str, location: str, domains: Collection[str]) -> str:
    """Return the URL to which the server of `url` redirects."""
    with contextlib.suppress(InvalidParameter, ValueError):
        found = urljoin(url, location)
        parts = _split(found)
        if parts.scheme == "https" or parts.scheme == _split(url).scheme == "http":
            _check_host(parts, domains)
            return found
    raise FetchFailed("it cannot be fetched: its server redirects to a URL that is not allowed")


@contextmanager
def _get(parts: SplitResult, domains: Collection[str], seconds: float) -> Iterator[http.client.HTTPResponse]:
    host, port = _host(parts)
    named = _check_host(parts, domains)
    connection = http.client.HTTPConnection(host, port)
    connection.sock = _connect(host, port, seconds, private=named)
    try:
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        connection.putrequest("GET", _target(parts), skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", parts.netloc.rpartition("@")[2].encode("idna"))
        connection.putheader("Accept-Encoding", "identity")
        connection.putheader("User-Agent", "quire")
        connection.endheaders()
        with connection.getresponse() as answer:
            yield answer
    finally:
        connection.close()


def _host(parts: SplitResult) -> tuple[str, int]:
    return (parts.hostname or "").rstrip(".").lower(), parts.port or _PORTS[parts.scheme]


def _check_host(parts: SplitResult, domains: Collection[str]) -> bool:
    """Raise an error for a host that is not allowed; return whether it is allowed by host and port."""
    host, port = _host(parts)
    if not domains:
        raise InvalidParameter(
            f"{parts.scheme}: URLs are not allowed here. Send data: URLs, or start Quire with --allowed-media-domains HOST"
        )
    allowed = {domain.rstrip(".").lower() for domain in domains}
    if (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") in allowed:
        return True
    if host not in allowed and ANY_HOST not in allowed:
        raise InvalidParameter("its host is not allowed here. The server's --allowed-media-domains lists the hosts")
    if parts.scheme == "http":
        raise InvalidParameter("its URL must begin with https: here. --allowed-media-domains HOST:PORT allows http for a host")
    return False


def _target(parts: SplitResult) -> str:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(ord(character) <= 32 or ord(character) == 127 for character in target):
        raise InvalidParameter("its URL is not valid")
    return "".join(character if character.isascii() else _quoted(character) for character in target)


def _quoted(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def _connect(host: str, port: int, seconds: float, private: bool) -> socket.socket:
    """Connect to an address of the host that was checked. private: it may be any address"""
    found = _resolve(host, port)
    if not private and not all(is_public(str(address[0])) for *_, address in found):
        raise FetchFailed("it cannot be fetched: the connection failed")  # whether such a name exists is not revealed
    failure = OSError()
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(seconds)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _resolve(host: str, port: int) -> list[Any]:
    """Return the addresses of a host. The resolver of the system cannot be interrupted, so a thread waits for it."""
    found: list[Any] = []
    failures: list[Exception] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask, name="quire-resolver", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return found


def is_public(address: str) -> bool:
    """Return whether an address is one of the public internet, also if it contains one of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
