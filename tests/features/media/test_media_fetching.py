"""URLs are fetched from allowed hosts only, at addresses that were checked, within time and size."""

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from picture_host import picture_host
from quire.features.media.workers import fetch as fetch_module
from quire.features.media.workers import wire
from quire.features.media.workers.fetch import fetch, is_public
from quire.types.errors import FetchFailed, InvalidParameter

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")


@pytest.fixture(scope="module")
def port():
    with picture_host() as port:
        yield port


@pytest.fixture
def get(tmp_path):
    def fetched(url, domains=(), root="", seconds=5.0, most=1 << 20, patience=5.0):
        out = tmp_path / "copy"
        out.write_bytes(b"")
        fetch(wire.Fetch(url, list(domains), str(root), str(out), seconds, patience, most))
        return out.read_bytes()

    return fetched


def test_an_allowed_host_is_read_also_after_a_redirect(get, port):
    for path in ("picture", "moved", f"to/http://127.0.0.1:{port}/picture?a=b"):
        assert get(f"http://127.0.0.1:{port}/{path}", [f"127.0.0.1:{port}"]) == b"picture"


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("nothing", FetchFailed, "answered 404"),
        ("loop", FetchFailed, "redirected more than"),
        ("gzip", FetchFailed, "compressed"),
        ("short", FetchFailed, "ended too early"),
        ("to/http://127.0.0.1:1/x", FetchFailed, "redirects to a URL"),
        ("to/http://169.254.169.254/latest", FetchFailed, "redirects to a URL"),
        ("to/file:///etc/passwd", FetchFailed, "redirects to a URL"),
        ("to/gopher://x", FetchFailed, "redirects to a URL"),
        ("to/https://[", FetchFailed, "redirects to a URL"),
        ("endless", InvalidParameter, "more than 1048576 bytes"),
    ],
)
def test_answers_that_are_refused(get, port, path, kind, reason):
    with pytest.raises(kind, match=reason) as refused:
        get(f"http://127.0.0.1:{port}/{path}", [f"127.0.0.1:{port}"])
    assert "127.0" not in str(refused.value) and "169" not in str(refused.value)


def test_a_slow_stream_ends_in_time(get, port):
    with pytest.raises(FetchFailed, match="too slow"):
        get(f"http://127.0.0.1:{port}/slow", [f"127.0.0.1:{port}"], seconds=0.5)


def test_a_slow_stream_may_go_on_while_it_is_on_its_way(get, port, monkeypatch):
    allowed = [f"127.0.0.1:{port}"]
    monkeypatch.setattr(fetch_module, "CHECK_INTERVAL_S", 0.05)
    assert get(f"http://127.0.0.1:{port}/steady", allowed, patience=0.3, seconds=60) == b"x" * 20
    with pytest.raises(FetchFailed, match="too slow"):  # it would take one second
        get(f"http://127.0.0.1:{port}/steady", allowed, patience=0.3, seconds=0.6)
    with pytest.raises(FetchFailed, match="too slow"):  # it does not say when it ends
        get(f"http://127.0.0.1:{port}/endless", allowed, patience=0.3, seconds=60, most=1 << 40)
    monkeypatch.setattr(fetch_module, "STALL_TIMEOUT_S", 0.01)
    with pytest.raises(FetchFailed, match="too slow"):  # nothing came for a while
        get(f"http://127.0.0.1:{port}/steady", allowed, patience=0.3, seconds=60)


def test_a_slow_resolver_is_not_waited_for(get, monkeypatch):
    come = threading.Event()
    monkeypatch.setattr(fetch_module.socket, "getaddrinfo", lambda *_, **__: come.wait(60))
    with pytest.raises(FetchFailed, match="too slow"):
        get("https://slow.example/", ["slow.example"], patience=0.2)
    come.set()


def test_a_host_that_is_allowed_by_name_must_have_public_addresses(get, port, monkeypatch):
    url = f"https://pictures.example:{port}/picture"
    real, asked = socket.getaddrinfo, []

    def resolve(host, *args, **options):
        asked.append(host)
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(fetch_module.socket, "getaddrinfo", resolve)
    with pytest.raises(FetchFailed, match="the connection failed"):
        get(url, ["pictures.example"])
    with pytest.raises(FetchFailed, match="the connection failed"):
        get(url, ["*"])
    assert asked == ["pictures.example"] * 2
    url = url.replace("https", "http")
    assert get(url, [f"pictures.example:{port}"]) == b"picture"
    assert get(f"{url[: -len('picture')]}host", [f"pictures.example:{port}"]) == f"pictures.example:{port}".encode()
    assert asked == ["pictures.example"] * 4  # once for each: the address that was checked is used
    with pytest.raises(InvalidParameter, match="must begin with https"):
        get(url, ["pictures.example"])
    with pytest.raises(InvalidParameter, match="host is not allowed"):
        get(url, ["example", "other.pictures.example", "pictures.example.org", f"pictures.example:{port + 1}"])
    with pytest.raises(InvalidParameter, match="start Quire with --allowed-media-domains"):
        get(url)


def make_certificate(directory):
    """Make a key, and a certificate for 127.0.0.1."""
    key, certificate = directory / "key.pem", directory / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(make, check=True, capture_output=True)
    return key, certificate


@needs_openssl
def test_a_host_that_is_allowed_by_name_is_read_by_https(get, monkeypatch, tmp_path):
    key, certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with picture_host(context) as port:
        url = f"https://127.0.0.1:{port}/host"
        monkeypatch.setattr(fetch_module, "is_public", lambda address: address == "127.0.0.1")
        with pytest.raises(FetchFailed, match="its certificate is not valid"):
            get(url, ["127.0.0.1"])
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert get(url, ["127.0.0.1"]) == get(url, ["*"]) == f"127.0.0.1:{port}".encode()
        with pytest.raises(FetchFailed, match="redirects to a URL"):  # not from https to http
            get(url.replace("host", f"to/http://127.0.0.1:{port}/host"), ["127.0.0.1", f"127.0.0.1:{port}"])


def test_a_server_that_is_not_there_is_not_named(get):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(FetchFailed, match="the connection failed") as refused:
        get(f"http://127.0.0.1:{port}/x", [f"127.0.0.1:{port}"])
    assert str(port) not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


def test_addresses_that_are_public():
    assert all(map(is_public, ("8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808")))


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / "below").mkdir(parents=True)
    (root / "below" / "a picture.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "directory").symlink_to(tmp_path)
    (root / "good link").symlink_to(root / "below" / "a picture.png")
    return root


def test_files_below_the_allowed_directory_are_read(get, root):
    assert get(f"file://{root}/below/a%20picture.png", root=root) == b"picture"
    assert get(f"file://localhost{root}/good%20link", root=root) == b"picture"


@pytest.mark.parametrize(
    "path", ["../secret", "%2e%2e/secret", "link", "directory/secret", "below/../../secret", "below", "", "/etc/passwd", "none"]
)
def test_other_files_are_not_read(get, root, path):
    url = f"file://{path}" if path.startswith("/") else f"file://{root}/{path}"
    with pytest.raises((InvalidParameter, FetchFailed)) as refused:
        get(url, root=root)
    assert str(root) not in str(refused.value) and "secret" not in str(refused.value)


def test_a_pipe_and_a_large_file_are_not_read(get, root):
    import os

    os.mkfifo(root / "pipe")
    with pytest.raises(InvalidParameter, match="regular file"):
        get(f"file://{root}/pipe", root=root)
    with pytest.raises(InvalidParameter, match="more than 3 bytes"):
        get(f"file://{root}/below/a%20picture.png", root=root, most=3)
    with pytest.raises(InvalidParameter, match="allowed-local-media-path"):
        get(f"file://{Path('/etc/passwd')}")
    with pytest.raises(InvalidParameter, match="must not name a host"):
        get("file://other/etc/passwd", root=root)
