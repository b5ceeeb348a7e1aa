"""What may come to the place where nodes bring engines, beside good nodes: another model, garbage, closed connections."""

import asyncio
import json
import os
import resource
import shutil
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import PATIENCE
from quire import EngineArgs
from quire.engine import handshake, ipc, node_agent
from quire.engine import node_listener as listener_module
from quire.engine.handshake import connect, difference, own_terms, receive_json, send_json, terms_of
from quire.engine.node_agent import NodeAgent
from quire.engine.node_listener import NodeListener, RemoteEngine
from quire.engine.supervisor import Supervisor, SupervisorLimits
from quire.engine.timeline import Timeline
from quire.proc.channel import Frames
from quire.types.errors import EngineError

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
HELLO = {"key": "", "engine": 1, "clock": 0.5}


@pytest.fixture(scope="module")
def terms(tiny_model):
    return terms_of(EngineArgs(str(tiny_model)))


@pytest.fixture
def node_listener(terms):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    node_listener = NodeListener(("127.0.0.1", port), range(1, 3), terms)
    yield node_listener
    node_listener.close()


def come(node_listener, **said):
    connection = connect(node_listener.address, 0.0)
    send_json(connection, said)
    return connection, receive_json(connection, PATIENCE)


def changed(model, directory, file, change):
    """A copy, with one file that is another."""
    copy = directory / "copy"
    shutil.copytree(model, copy)
    (copy / file).write_bytes(change((copy / file).read_bytes()))
    return copy


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "config.json",
            lambda text: text.replace(b"1e-06", b"1e-05"),
            "its model is not machine 0's: 'config.json' is",
        ),
        (
            "model.safetensors",
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            "its model is not machine 0's: 'weights' is another one",
        ),
    ],
)
def test_a_node_with_another_model_is_refused(tiny_model, tmp_path, node_listener, caplog, file, change, message):
    other = changed(tiny_model, tmp_path, file, change)
    args = EngineArgs(str(other), data_parallel_size=3, data_parallel_rpc_port=node_listener.address[1])
    with pytest.raises(EngineError, match=f"machine 0 refused this machine: {message}"):
        NodeAgent(args, 1, 2).run()
    assert message in caplog.text
    good, told = come(node_listener, **HELLO, **own_terms(EngineArgs(str(tiny_model))))
    with good:
        assert told == {"engine": 1}, "another one may come"


def test_what_must_agree(tiny_model, terms):
    def refusal(**given):
        return difference(terms, own_terms(EngineArgs(str(tiny_model), **given)))

    assert refusal() is None
    assert refusal(dtype="half") == "its dtype is 'float16', machine 0's is 'auto'; remove it on that machine"
    assert refusal(max_model_len=64) == "its max_model_len is 64, machine 0's is None; remove it on that machine"
    assert refusal(load_format="dummy") == "its model is not machine 0's: 'weights' is missing"
    assert difference(terms, {**terms, "version": "\ud800" * 9999}).startswith("its Quire is '\\ud800")
    assert difference(terms, {**terms, "files": []}) == "its model is not machine 0's: 'config.json' is missing"
    dummy = EngineArgs(str(tiny_model), load_format="dummy", dtype="float16")
    assert difference(terms_of(dummy), own_terms(EngineArgs(str(tiny_model)))) is None, "nobody reads the weights"
    assert difference(terms_of(dummy), own_terms(EngineArgs(str(tiny_model), dtype="half"))) is None


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told_to_start(frames):
    frames.socket.settimeout(PATIENCE)
    while (frame := frames.next()) is None:
        assert frames.receive()
    assert isinstance(ipc.decode_command(frame), ipc.StartEngine)


def hello(text):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<I", len(data)) + data


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    hello(b"[" * 60000),
    hello(b"NaN"),
    hello(b'{"key": "\\ud800", "engine": 1}'),
    *(hello(HELLO | {"clock": clock}) for clock in ([], None, "nan", float("nan"), float("inf"), 10**400)),
    *(hello(HELLO | {"engine": engine}) for engine in (None, "\ud800", True, 1e308, [])),
]


def test_garbage_is_a_line_in_the_log(node_listener, caplog):
    for garbage in GARBAGE:
        caplog.clear()
        with socket.create_connection(node_listener.address, timeout=PATIENCE) as stranger:
            stranger.sendall(garbage)
            try:
                while stranger.recv(1000):
                    pass
            except ConnectionResetError:  # it was closed before all was read
                pass
        [record] = caplog.records
        assert record.exc_info is None and "\n" not in record.getMessage(), garbage


def test_a_long_number_is_shortened(node_listener, terms):
    stranger, told = come(node_listener, **HELLO | terms | {"engine": 10**3000})
    stranger.close()
    assert told["refused"].startswith("engine 1000") and "000... is not one of those of other nodes, 1 to 2" in told["refused"]
    assert len(told["refused"]) < 300


def test_accepts_again_when_there_are_descriptors(node_listener, terms, caplog):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled = [os.dup(0)]
    with socket.socket() as node:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(node.fileno(), filled[0]) + 8, limits[1]))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    filled.append(os.dup(0))
            node.connect(node_listener.address)
            until(lambda: "nodes cannot connect for the moment" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in filled:
                os.close(descriptor)
        send_json(node, HELLO | terms)
        assert receive_json(node, PATIENCE) == {"engine": 1}, "it had its descriptor before"
    node, told = come(node_listener, **HELLO, **terms)
    with node:
        assert told == {"engine": 1}


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_many_who_say_nothing(node_listener, terms, caplog):
    """They have few descriptors of this process, and few lines of its log; a good node is let in among them."""
    before = descriptors()
    silent = [socket.create_connection(node_listener.address, timeout=PATIENCE) for _ in range(300)]
    assert silent[0].recv(1) == b"", "the oldest are closed"
    good, told = come(node_listener, **HELLO, **terms)
    assert told == {"engine": 1}
    until(lambda: descriptors() - before <= len(silent) + handshake.MAX_SILENT_CONNECTIONS + 2)
    assert len(caplog.records) == handshake.MAX_LOG_LINES
    for connection in (good, *silent):
        connection.close()


def test_who_is_closed_before_its_hello_comes_again(tiny_model, node_listener, monkeypatch):
    args = EngineArgs(str(tiny_model), data_parallel_size=3, data_parallel_rpc_port=node_listener.address[1])
    away, hello = [], node_agent.send_json

    def say_late(connection, what):
        if not away:
            away.append(connection.shutdown(socket.SHUT_RDWR))
        hello(connection, what)

    monkeypatch.setattr(node_agent, "send_json", say_late)
    node = NodeAgent(args, 1, 1)
    running = threading.Thread(target=node.run, daemon=True)
    running.start()
    until(lambda: 1 in node_listener._waiting)
    node._over.set()
    running.join(PATIENCE)
    assert away and not node.errors


@pytest.mark.parametrize("spoil", [socket.socket.close, lambda connection: connection.sendall(b"junk")])
def test_only_who_waits_is_handed_over(tiny_model, node_listener, terms, spoil):
    spoiled, _ = come(node_listener, **HELLO, **terms)
    until(lambda: 1 in node_listener._waiting)
    spoil(spoiled)
    until(lambda: not node_listener._waiting[1].waits)
    engine = RemoteEngine(EngineArgs(str(tiny_model)), node_listener, 1)
    until(lambda: 1 not in node_listener._waiting)
    node, _ = come(node_listener, **HELLO, **terms)
    told_to_start(Frames(node))
    assert engine.ending() is None
    for connection in (engine, node, spoiled):
        connection.close()


def test_a_node_that_begins_nothing(tiny_model, node_listener, terms, monkeypatch):
    monkeypatch.setattr(listener_module, "BEGIN_TIMEOUT_S", 0.1)
    node, _ = come(node_listener, **HELLO, **terms)
    engine = RemoteEngine(EngineArgs(str(tiny_model)), node_listener, 1)
    until(lambda: engine.ending() is not None)
    assert engine.closed and engine.ending() == "a fault of its node (127.0.0.1): it did not begin within 0 s"
    engine.close()
    node.close()


def test_frames_of_no_engine_are_a_lost_connection(tiny_model, node_listener, terms):
    args = EngineArgs(str(tiny_model))
    ready = ipc.Ready(64, 8, "cpu", "float32", 64, 4, 1, Timeline([], 0.0, 0.0), 16)
    news = []
    listener = SimpleNamespace(
        num_open=0,
        on_ready=lambda ready: news.append("ready"),
        on_lost=lambda ids: news.append("lost"),
        on_dead=lambda why: news.append(why),
    )

    async def life(say_last):
        """Of an engine on a node."""
        heard_of = len(news)
        node, _ = await asyncio.to_thread(come, node_listener, **HELLO, **terms)
        frames = Frames(node)
        await asyncio.to_thread(told_to_start, frames)
        frames.send(ipc.encode(ipc.Begun(7)))
        frames.send(ipc.encode(ready))
        while news[heard_of:] != ["ready"]:
            await asyncio.sleep(0.01)
        if say_last is not None:
            frames.send(say_last)
            frames.send(ipc.encode(ready))  # nobody listens any more
            while news[heard_of:] != ["ready", "lost"]:
                await asyncio.sleep(0.01)
        node.close()

    async def scene():
        supervisor = Supervisor(lambda: RemoteEngine(args, node_listener, 1), SupervisorLimits.of(args), listener, "engine 1")
        task = asyncio.create_task(supervisor.run())
        for bad in (b"", b"\xc1", b"\x81\xa1x\x01", b"\x93\x01\x02\x03"):
            await asyncio.wait_for(life(bad), PATIENCE)
            assert "a fault of its node (127.0.0.1): invalid message" in supervisor.last_loss
        await asyncio.wait_for(life(None), PATIENCE)
        assert supervisor.restarts == 4 and news == ["ready", "lost"] * 4 + ["ready"]
        task.cancel()
        supervisor.stop(0.0)

    asyncio.run(scene())


LONG = struct.pack("<I", (1 << 32) - 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (LONG, "it announced a message of 4,294,967,295 bytes, and 1,048,576 are the most"),
        (hello(b"junk"), "invalid message"),
        (hello(ipc.encode(ipc.Failed("EngineError", "because"))), "Failed before the engine had begun"),
        (hello(ipc.encode(ipc.Begun(7))) + LONG, "bytes, and 1,073,741,824 are the most"),
        (None, "the connection to its node"),
    ],
)
def test_strangers_do_not_fail_the_first_start(tiny_model, node_listener, terms, caplog, bad, message):
    args = EngineArgs(str(tiny_model))
    news = []
    listener = SimpleNamespace(on_ready=news.append, on_dead=news.append)

    async def scene():
        supervisor = Supervisor(lambda: RemoteEngine(args, node_listener, 1), SupervisorLimits.of(args), listener, "engine 1")
        task = asyncio.create_task(supervisor.run())
        stranger, _ = await asyncio.to_thread(come, node_listener, **HELLO, **terms)
        with stranger:
            await asyncio.to_thread(told_to_start, Frames(stranger))
            if bad is not None:
                stranger.sendall(bad)
                await asyncio.to_thread(gone, stranger)
        node, _ = await asyncio.to_thread(come, node_listener, **HELLO, **terms)
        frames = Frames(node)
        await asyncio.to_thread(told_to_start, frames)
        frames.send(ipc.encode(ipc.Begun(7)))
        frames.send(ipc.encode(ipc.Ready(64, 8, "cpu", "float32", 64, 4, 1, Timeline([], 0.0, 0.0), 16)))
        await asyncio.wait_for(supervisor.wait_ready(), PATIENCE)
        task.cancel()
        supervisor.stop(0.0)
        node.close()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    assert len(news) == 1 and message in caplog.text


def gone(connection):
    """Waits until the other end is closed."""
    connection.settimeout(PATIENCE)
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass


def test_an_engine_is_not_silent_before_its_node_has_connected(tiny_model):
    nodes = SimpleNamespace(wait=lambda engine, over: over.wait(PATIENCE) and None, absence=lambda engine: "no node")
    limits = SupervisorLimits.of(EngineArgs(str(tiny_model), engine_start_timeout=60.0))
    supervisor = Supervisor(lambda: RemoteEngine(EngineArgs(str(tiny_model)), nodes, 1), limits, listener=None)
    supervisor._silence = SimpleNamespace(seconds=1e4)
    assert supervisor._diagnose() is None
    supervisor._started_at -= 60.0
    assert supervisor._diagnose() == "it was not ready after 60 s"
    supervisor.stop(0.0)
