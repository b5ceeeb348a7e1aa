"""What one client can do with a socket, and what its neighbours notice of it: nothing."""

import dataclasses
import os
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from raw_http import Hosted, Raw, hosted, make_certificate, needs_openssl, status
from server_process import body, read_stream, serving, wait_for

from patience import PATIENCE
from quire.serve.limits import LIMITS

MEGABYTE = 2**20
TURN = 0.15  # seconds of processor time that a turn of the loop may take; 0.06 on a slow machine
GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"Connection: close\r\n\r\n"


@pytest.fixture(scope="module")
def patient() -> Iterator[Hosted]:
    with hosted() as server:
        yield server


@pytest.mark.parametrize(
    ("begin", "unit", "code"),
    [
        (b"GET /", b"a", 414),
        (b"", b"A", 400),  # a method
        (GET, b"a", 431),  # a header's name
        (GET + b"X: ", b"a", 431),
        (GET + b"X:", b" ", 431),
        (GET, b"X: y\r\n", 431),
        (GET, b"X: " + b"y" * 1000 + b"\r\n", 431),
        (b"", b"\r\n", 431),
        (CHUNKED + b"1;", b"a", 431),  # an extension of a chunk
        (CHUNKED + b"1;", b"a=b;", 431),
        (CHUNKED + b"0\r\n", b"X: y\r\n", 431),  # trailers
        (CHUNKED + b"0\r\nX: ", b"y", 431),
        (CHUNKED, b"0", 431),  # a chunk's size
    ],
)
def test_endless_heads_are_bounded_while_they_are_read(patient: Hosted, begin: bytes, unit: bytes, code: int) -> None:
    beside = patient.connect()
    beside.send(b"GET /stream?n=50 HTTP/1.1\r\n" + END)
    patient.turn = 0.0
    raw, sent = patient.connect(), 0
    raw.send(begin)
    while sent < 64 * MEGABYTE and raw.send(unit * (MEGABYTE // len(unit))):
        sent += MEGABYTE
    assert sent < 16 * MEGABYTE  # what fits into the sockets' buffers, and not much more
    raw.close()
    assert patient.turn < TURN
    patient.hasty = True
    assert b"\n49 " in beside.read()  # the last piece
    patient.hasty = False
    beside.close()
    assert status(patient.ask(begin + unit * (2 * LIMITS.header_bytes // len(unit)))) == code


def test_refusals_have_an_id_where_answers_have_one(patient: Hosted) -> None:
    with hosted(enable_request_id_headers=False) as silent:
        told, untold = (server.ask(b"NO\r\n\r\n") for server in (patient, silent))
    assert status(told) == status(untold) == 400
    assert b"x-request-id: " in told and b"x-request-id" not in untold


@pytest.mark.parametrize(
    ("unit", "most"),
    [
        (b"1\r\nx\r\n", 4),  # a chunk for every byte
        (GET + b"\r\n", 1),  # requests before the answer to the first
        (GET + b"Connection: keep-alive\r\n\r\n\r\n", 1),
    ],
)
def test_much_at_once_is_parsed_in_turns(patient: Hosted, unit: bytes, most: int) -> None:
    patient.turn = 0.0
    raw = patient.connect()
    raw.send(CHUNKED if unit.startswith(b"1") else b"GET /stream?n=50 HTTP/1.1\r\n\r\n")
    for _ in range(most):
        raw.send(unit * (MEGABYTE // len(unit)))
    raw.close()
    assert status(patient.ask(GET + END)) == 200
    assert patient.turn < TURN


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (GET + END, 200),
        (b"\r\n" + GET + END, 200),
        (GET.replace(b"Host: a\r\n", b"") + END, 200),
        (b"GET http://a/echo HTTP/1.1\r\n" + END, 200),
        (b"GET /echo HTTP/1.0\r\n\r\n", 200),
        (b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", 200),
        (POST + END + b"abc", 200),  # no body was announced
        (POST + b"Content-Length: 3\r\n" + END + b"abc", 200),
        (CHUNKED.replace(b"\r\n\r\n", b"\r\n" + END) + b"3;a=b\r\nabc\r\n0\r\nX-Late: 1\r\n\r\n", 200),
        (GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + GET + b"\r\n", 200),
        (POST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 3\r\n\r\nabc", 400),
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
        (POST + b"Content-Length: -3\r\n\r\nabc", 400),
        (POST + b"Content-Length: +3\r\n\r\nabc", 400),
        (POST + b"Content-Length: 0x3\r\n\r\nabc", 400),
        (POST + b"Content-Length: 99999999999999999999999\r\n\r\nabc", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\nabc", 400),
        (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\nabc", 400),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"-1\r\nx\r\n0\r\n\r\n", 400),
        (CHUNKED + b"fffffffffffffffff\r\nx\r\n", 400),
        (CHUNKED + b"0x1\r\nx\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\r\nxyz\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\nx\n0\n\n", 400),
        (GET + b"X: a\0b\r\n\r\n", 400),
        (GET + b"X: a\rb\r\n\r\n", 400),
        (GET + b"X: a\r\n b\r\n\r\n", 400),
        (GET + b"X Y: a\r\n\r\n", 400),
        (GET.replace(b"\r\n", b"\n") + b"\n", 400),
        ("GET /é HTTP/1.1\r\n\r\n".encode(), 400),
        (b"GET /\0 HTTP/1.1\r\n\r\n", 400),
        (b"GET http://a HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT a:443 HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /echo\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
    ],
)
def test_what_a_request_is(patient: Hosted, request_: bytes, code: int) -> None:
    answer = patient.ask(request_)
    assert status(answer) == code
    assert answer.count(b"HTTP/1.1 ") == 1  # nothing of a request was taken for another one
    head = answer.partition(b"\r\n\r\n")[0]
    assert b"connection: close" in head
    if code != 200:
        assert b'"code":%d' % code in answer and b"x-request-id: " in head


def test_trailers_are_not_headers(patient: Hosted) -> None:
    answer = patient.ask(CHUNKED.replace(b"\r\n\r\n", b"\r\n" + END) + b"3\r\nabc\r\n0\r\nX-Late: 1\r\n\r\n")
    assert b'"size":3' in answer and b'"x-late":null' in answer


def test_expecting_to_go_on(patient: Hosted) -> None:
    raw = patient.connect()
    raw.send(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n" + END)
    assert raw.read_head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.send(b"abc")
    assert b'"size":3' in raw.read()
    refused = patient.connect()
    refused.send(POST.replace(b"echo", b"refuse") + b"Expect: 100-continue\r\nContent-Length: 3\r\n" + END)
    assert status(refused.read()) == 413


def test_requests_are_answered_in_order(patient: Hosted) -> None:
    slow = b"GET /stream?n=20 HTTP/1.1\r\n\r\n"
    answer = patient.ask(slow + (GET + b"\r\n") * (LIMITS.pipelined - 1) + GET + END)
    assert answer.count(b"HTTP/1.1 200") == LIMITS.pipelined + 1
    assert answer.index(b"\n19 ") < answer.index(b"/echo")


UNFINISHED = CHUNKED + b"3\r\nabc\r\nno length\r\n"


@pytest.mark.parametrize(
    ("rest", "more", "why"),
    [
        (b"garbage \r\n\r\n", 0, b"not a valid HTTP request"),
        (UNFINISHED, 0, b"not a valid HTTP request"),
        ((GET + b"\r\n") * 3 + UNFINISHED, 3, b"not a valid HTTP request"),
        ((GET + b"\r\n") * (LIMITS.pipelined + 1), LIMITS.pipelined, b"at most 16 requests may wait"),
        ((GET + b"\r\n") * 1000, LIMITS.pipelined, b"at most 16 requests may wait"),
    ],
)
def test_what_follows_is_refused_after_the_answers_to_what_came_before(
    patient: Hosted, rest: bytes, more: int, why: bytes
) -> None:
    answer = patient.ask(b"GET /stream?n=20 HTTP/1.1\r\n\r\n" + rest)
    whole, end, last = answer.partition(b"0\r\n\r\n")  # of the stream
    assert status(whole) == 200 and end and b"\n19 " in whole
    before, refused, _ = last.rpartition(b"HTTP/1.1 400 ")
    assert refused and why in last and before.count(b"HTTP/1.1 200") == last.count(b"HTTP/1.1 ") - 1 == more


def test_whoever_hangs_up_with_requests_waiting_is_gone() -> None:
    with hosted() as server:
        raw = server.connect()
        raw.send(b"GET /stream?n=100000 HTTP/1.1\r\n\r\n" + GET + b"\r\n")
        assert status(raw.socket.recv(1000)) == 200
        raw.close()
        wait_for(lambda: server.seen == ["ended"])
        wait_for(lambda: len(server.server.connection_limits) == 0)


def test_a_body_that_nobody_wants() -> None:
    """An answer that comes early can be read by whoever sends all first; an endless body is cut off."""
    with hosted(dataclasses.replace(LIMITS, body_bytes=MEGABYTE)) as server:
        begin = POST.replace(b"echo", b"refuse")
        raw = server.connect()
        assert raw.send(begin + b"Content-Length: %d\r\n\r\n" % (2 * MEGABYTE - 1) + b"x" * (2 * MEGABYTE - 1))
        assert status(raw.read_head()) == 413
        raw.close()
        raw, sent = server.connect(), 0
        raw.send(begin + b"Content-Length: %d\r\n\r\n" % (256 * MEGABYTE))
        while sent < 256 * MEGABYTE and raw.send(b"x" * MEGABYTE):
            sent += MEGABYTE
        assert sent < 32 * MEGABYTE
        assert server.turn < TURN


# ---- patience --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hurried() -> Iterator[Hosted]:
    with hosted(dataclasses.replace(LIMITS, read_seconds=20), tempo=50) as server:
        yield server


@pytest.mark.parametrize(
    ("begin", "drop", "code"),
    [
        (b"", b"", 0),
        (b"GET /ec", b"", 408),
        (GET, b"X: y\r\n", 408),  # something comes all the time, but no end
        (POST + b"Content-Length: 100000\r\n\r\n", b"", 408),
        (POST + b"Content-Length: 100000\r\n\r\n", b"x", 408),
        (CHUNKED, b"1\r\nx\r\n", 408),
        (CHUNKED + b"0\r\n", b"X: y\r\n", 408),
        (POST.replace(b"echo", b"refuse") + b"Content-Length: 100000\r\n\r\n", b"x", 413),  # answered, and not done
    ],
)
def test_nobody_is_slow_for_ever(hurried: Hosted, begin: bytes, drop: bytes, code: int) -> None:
    raw, over = hurried.connect(), threading.Event()

    def drip() -> None:
        raw.send(begin)
        while drop and not over.wait(0.02) and raw.send(drop):
            pass

    dripping = threading.Thread(target=drip)
    dripping.start()
    answer = raw.read()
    over.set()
    dripping.join()
    assert status(answer) == code
    wait_for(lambda: len(hurried.server.connection_limits) == 0)
    assert hurried.server.connection_limits.unfinished == 0


def test_silence_between_requests_is_the_users_choice() -> None:
    with hosted(tempo=50, timeout_keep_alive=1) as server:
        raw = server.connect()
        raw.send(GET + b"\r\n")
        assert raw.read().count(b"HTTP/1.1 200") == 1  # until the server hangs up
    with hosted(tempo=200, timeout_keep_alive=60) as server:  # longer than patience with heads
        raw = server.connect()
        raw.send(GET + b"\r\n")
        assert status(raw.read_head()) == 200
        time.sleep(0.5)  # 100 seconds, at this pace
        raw.send(GET + END)
        assert b"HTTP/1.1 200" in raw.read()


def test_a_body_that_comes_slowly_but_comes(hurried: Hosted) -> None:
    raw, over = hurried.connect(), threading.Event()
    begun = hurried.server.connection_limits.limits.body_seconds / 50
    size = 2 * LIMITS.body_progress
    raw.send(POST + b"Content-Length: %d\r\n" % (8 * size) + END)
    for _ in range(8):  # four times the patience altogether
        over.wait(begun / 2)
        raw.send(b"x" * size)
    assert b'"size":%d' % (8 * size) in raw.read()


def test_an_answer_that_nobody_reads(hurried: Hosted) -> None:
    raw = hurried.connect()
    hurried.seen.clear()
    raw.send(b"GET /stream?n=100000&times=10000&pause=0 HTTP/1.1\r\n\r\n")
    wait_for(lambda: hurried.seen == ["ended"])
    wait_for(lambda: len(hurried.server.connection_limits) == 0)
    raw.close()


def test_an_answer_takes_as_long_as_it_takes(hurried: Hosted) -> None:
    answer = hurried.ask(b"GET /stream?n=4&pause=0.3 HTTP/1.1\r\n" + END)  # 60 seconds, at this pace
    assert answer.endswith(b"0\r\n\r\n")


# ---- all together ----------------------------------------------------------------------------------------------------


def test_idle_connections_make_room() -> None:
    with hosted(dataclasses.replace(LIMITS, connections=8)) as server:
        streams = [server.connect() for _ in range(4)]
        for raw in streams:
            raw.send(b"GET /stream?n=200 HTTP/1.1\r\n" + END)
            raw.read_head()
        held = [server.connect() for _ in range(20)]
        held[-1].send(GET)
        assert status(server.ask(GET + END)) == 200
        assert len(server.server.connection_limits) <= 8
        assert held[0].read() == b""
        server.hasty = True
        for raw in streams:
            assert b"\n199 " in raw.read()


def test_when_all_are_busy_the_next_is_told_so() -> None:
    with hosted(dataclasses.replace(LIMITS, connections=2)) as server:
        streams = [server.connect() for _ in range(2)]
        for raw in streams:
            raw.send(b"GET /stream?n=200 HTTP/1.1\r\n" + END)
            raw.read_head()
        refused = server.connect().read()
        assert status(refused) == 503 and b"retry-after: 5" in refused
        server.hasty = True
        for raw in streams:
            assert b"\n199 " in raw.read()
        assert status(server.ask(GET + END)) == 200


def test_unfinished_bodies_are_bounded_altogether() -> None:
    """Who holds much for long goes; who comes and finishes is not kept out."""
    limits = dataclasses.replace(LIMITS, unfinished_bytes=8 * MEGABYTE)
    with hosted(limits) as server:
        slow = [server.connect() for _ in range(16)]
        for raw in slow:
            raw.send(POST + b"Content-Length: %d\r\n\r\n" % (2 * MEGABYTE) + b"x" * MEGABYTE)
        wait_for(lambda: server.server.connection_limits.unfinished > 6 * MEGABYTE)
        for _ in range(4):
            body = b"x" * MEGABYTE
            assert b'"size":%d' % MEGABYTE in server.ask(POST + b"Content-Length: %d\r\n" % MEGABYTE + END + body)
            assert server.server.connection_limits.unfinished <= limits.unfinished_bytes
        told = [raw for raw in slow if _has_news(raw.socket)]
        assert 8 <= len(told) < 16
        for raw in told:
            answer = raw.read()
            assert status(answer) == 503 and b"retry-after: 5" in answer
        for raw in slow:
            raw.close()
        wait_for(lambda: len(server.server.connection_limits) == 0)
        assert server.server.connection_limits.unfinished == 0


@needs_openssl
def test_tls_handshakes_that_are_not_done_count_and_make_room(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    settings = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    context = ssl.create_default_context(cafile=str(certificate))
    with hosted(dataclasses.replace(LIMITS, connections=8), **settings) as server:
        silent = [server.connect() for _ in range(20)]
        wait_for(lambda: sum(is_closed(raw) for raw in silent) == 12)
        wait_for(lambda: len(server.server.connection_limits) == 8)  # the server's thread counts after it has closed
        assert httpx.get(f"https://127.0.0.1:{server.port}/echo", verify=context, timeout=PATIENCE).status_code == 200
        silent[-1].send(GET + END)  # not TLS
        assert b"200" not in silent[-1].read()
        for raw in silent:
            raw.close()
        wait_for(lambda: len(server.server.connection_limits) == 0)


@needs_openssl
def test_tls_handshakes_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    with hosted(tempo=100, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as server:
        assert server.connect().read() == b""
        wait_for(lambda: len(server.server.connection_limits) == 0)


def is_closed(raw: Raw) -> bool:
    return bool(select.select([raw.socket], [], [], 0)[0])


def test_connections_leave_the_engine_its_descriptors(serve_model: Path) -> None:
    """More of them than the process may have open, while a stream runs, and then the engine is killed."""
    with serving(serve_model, descriptors=256, latency=0.03) as server, server.client() as http:
        url, begun, over = httpx.URL(server.url()), threading.Event(), threading.Event()
        assert url.port is not None
        held: list[Raw] = []

        def hold() -> None:
            while not over.wait(0.001 if len(held) < 600 else 0.01):
                raw = Raw(url.port or 0)
                raw.send(GET[: len(held) % 20])
                held.append(raw)

        with ThreadPoolExecutor(2) as pool:
            try:
                stream = pool.submit(read_stream, http, body(100, True), begun.set)
                assert begun.wait(PATIENCE)
                holding = pool.submit(hold)
                wait_for(lambda: len(held) > 500)
                os.kill(server.engine_pid(), signal.SIGKILL)
                events = stream.result(PATIENCE)
            finally:
                over.set()
            holding.result(PATIENCE)
        assert events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] == 100
        held.extend(Raw(url.port) for _ in range(300))
        wait_for(lambda: _ticks_within(1.0, server.process.pid) < 50)  # of 100: a server that spins never rests
        assert httpx.get(url.join("/livez"), timeout=PATIENCE).status_code == 200
        held.clear()


def _ticks_within(seconds: float, pid: int) -> int:
    before = _processor_ticks(pid)
    time.sleep(seconds)
    return _processor_ticks(pid) - before


def _processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _has_news(opened: socket.socket) -> bool:
    return bool(select.select([opened], [], [], 0)[0])
