"""Copy the content of a URL into a private file, in a media process.

http and https go to allowed hosts only, and to public addresses only, unless "host:port" was allowed as such. The address that
was checked is the one that is connected to, so a name cannot change its address in between. Redirects are checked again. Files
are read below one directory. No error names an address or a path.
"""

import hashlib
import http.client
import ipaddress
import os
import signal
import socket
import ssl
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from quire.features.media.workers import wire
from quire.types.errors import FetchFailed, InvalidParameter

MAX_REDIRECTS = 5
CHUNK_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class _Late(BaseException):
    """The deadline has passed. Not an Exception: nothing may catch it by accident."""


def fetch(job: wire.Fetch) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of the content."""
    try:
        with _deadline(job.seconds), Path(job.out).open("xb") as out:
            parts = _split(job.url)
            if parts.scheme == "file":
                return _copy_file(parts, job.root, _Copy(out, job.most))
            return _copy_remote(job, parts, _Copy(out, job.most))
    except _Late:
        raise FetchFailed(f"it cannot be fetched: it took more than {job.seconds:g} s") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # no message of these: they have addresses and paths
        reason = "its certificate is not valid" if isinstance(error, ssl.SSLCertVerificationError) else "the connection failed"
        reason = "the file cannot be read" if job.url[:5].lower() == "file:" else reason
        raise FetchFailed(f"it cannot be fetched: {reason}") from None


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt what is inside after `seconds`: a server that sends a byte now and then would never time out."""

    def late(number: int, frame: Any) -> None:  # noqa: ARG001
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.25)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Copy:
    """Write chunks to a file, within a limit."""

    def __init__(self, out: IO[bytes], most: int) -> None:
        self._out, self._most, self._size, self._hash = out, most, 0, hashlib.sha256()

    def all_of(self, source: Any) -> tuple[int, str]:
        while chunk := source.read(CHUNK_BYTES):
            self._size += len(chunk)
            self.refuse_more(self._size)
            self._hash.update(chunk)
            self._out.write(chunk)
        return self._size, self._hash.hexdigest()

    def refuse_more(self, size: int) -> None:
        if size > self._most:
            raise InvalidParameter(f"it has more than {self._most} bytes. Send a smaller one")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise InvalidParameter("its URL is not valid") from None
    if parts.scheme not in ("http", "https", "file"):
        raise InvalidParameter("its URL must begin with data:, https:, http: or file:")
    return parts


# ---- files


def _copy_file(parts: SplitResult, root: str, copy: _Copy) -> tuple[int, str]:
    if not root:
        raise InvalidParameter("file: URLs are not allowed here. Start the server with --allowed-local-media-path DIR")
    if parts.netloc not in ("", "localhost"):
        raise InvalidParameter("a file: URL must not name a host")
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
        copy.refuse_more(facts.st_size)
        return copy.all_of(source)


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root and path != root


# ---- http


def _copy_remote(job: wire.Fetch, parts: SplitResult, copy: _Copy) -> tuple[int, str]:
    url = job.url
    for _ in range(MAX_REDIRECTS + 1):
        with _get(parts, job.domains, job.seconds) as answer:
            if answer.status in (301, 302, 303, 307, 308):
                url = urljoin(url, answer.headers.get("location", ""))
                before, parts = parts, _split(url)
                if parts.scheme == "file" or (before.scheme == "https" and parts.scheme == "http"):
                    raise FetchFailed("it cannot be fetched: the server redirects to a URL that is not allowed")
                continue
            if answer.status != 200:
                raise FetchFailed(f"it cannot be fetched: the server answered {answer.status}")
            if answer.headers.get("content-encoding", "identity").lower() != "identity":
                raise FetchFailed("it cannot be fetched: the server sent it compressed")
            copy.refuse_more(answer.length or 0)
            return copy.all_of(answer)
    raise FetchFailed(f"it cannot be fetched: the server redirected more than {MAX_REDIRECTS} times")


@contextmanager
def _get(parts: SplitResult, domains: Collection[str], seconds: float) -> Iterator[http.client.HTTPResponse]:
    host, port = (parts.hostname or "").rstrip(".").lower(), parts.port or _PORTS[parts.scheme]
    literal = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    allowed = {domain.rstrip(".").lower() for domain in domains}
    if host not in allowed and literal not in allowed:
        raise InvalidParameter("its host is not allowed here. The server's --allowed-media-domains lists the hosts")
    connection = http.client.HTTPConnection(host, port)
    connection.sock = _connect(host, port, seconds, private=literal in allowed)
    try:
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        connection.putrequest("GET", _target(parts), skip_accept_encoding=True)
        connection.putheader("Accept-Encoding", "identity")
        connection.putheader("User-Agent", "quire")
        connection.endheaders()
        with connection.getresponse() as answer:
            yield answer
    finally:
        connection.close()


def _target(parts: SplitResult) -> str:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(ord(character) <= 32 or ord(character) == 127 for character in target):
        raise InvalidParameter("its URL is not valid")
    return "".join(character if character.isascii() else _quoted(character) for character in target)


def _quoted(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def _connect(host: str, port: int, seconds: float, private: bool) -> socket.socket:
    """Connect to an address of the host that was checked. private: it may be any address"""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
