"""Where the server listens. Sockets are bound before the model is loaded, so that a port in use is known at once."""

import errno
import ipaddress
import socket
import stat
from pathlib import Path

from quire.config.server_args import ServerArgs
from quire.types.errors import ConfigError

BACKLOG = 2048
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

Address = tuple[socket.AddressFamily, str]


def find_addresses(settings: ServerArgs) -> list[Address]:
    """The addresses that the host's name stands for; none for a Unix socket."""
    if settings.uds is not None:
        return []
    try:
        found = socket.getaddrinfo(settings.host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {settings.host}: {error.strerror or error}; give an address of this machine") from None
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def reachable(addresses: list[Address]) -> bool:
    """Can other machines connect?"""
    return not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for _, address in addresses)


def on_loopback(sockets: list[socket.socket]) -> bool:
    """Return whether all sockets listen on loopback addresses. Browsers cannot connect to a Unix socket, which is none."""
    internet = [each for each in sockets if each.family != socket.AF_UNIX]
    return bool(internet) and not reachable([(each.family, str(each.getsockname()[0])) for each in internet])


def listen(settings: ServerArgs, addresses: list[Address]) -> list[socket.socket]:
    if settings.uds is not None:
        return [_listen_unix(settings.uds)]
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for family, address in addresses:
            try:
                sockets.append(_listen_tcp(family, address, port))
            except OSError as error:
                if error.errno in _NO_SUCH_FAMILY and len(addresses) > 1:
                    continue  # the name has an IPv6 address, say, and this machine no IPv6
                raise ConfigError(_why(error, address, port)) from None
            port = sockets[-1].getsockname()[1]
        if not sockets:
            raise ConfigError(f"--host {settings.host} is not an address of this machine")
    except ConfigError:
        for opened in sockets:
            opened.close()
        raise
    return sockets


def url_of(settings: ServerArgs, sockets: list[socket.socket]) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = sockets[0].getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def page_of(settings: ServerArgs, sockets: list[socket.socket]) -> str | None:
    """Where a browser on this machine finds the page; None where it does not."""
    if settings.disable_page or settings.uds is not None:
        return None
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    url = url_of(settings, sockets)
    for address, loopback in everywhere.items():
        url = url.replace(f"//{address}:", f"//{loopback}:")
    return f"{url}/"


def _listen_tcp(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((address, port))
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def _why(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {address} is in use: stop what listens there, or choose another with --port (0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} of {address} is not for ordinary users: choose one above 1023 with --port"
    return f"cannot listen on {address}, port {port}: {error.strerror}"


def _listen_unix(path: str) -> socket.socket:
    """The directory and the umask decide who may connect. A socket without a listener is replaced."""
    _remove_stale(path)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(path)
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return opened


def _remove_stale(path: str) -> None:
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path}: there is a file of that name; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError as error:
            raise ConfigError(f"--uds {path}: {error.strerror}") from None
        else:
            raise ConfigError(f"--uds {path}: another server listens there; choose another path")
