"""Engines on a second node, here a thread with processes of its own, behind TCP: the same tokens, and losses are pauses."""

import asyncio
import os
import signal
import socket
import threading

import pytest
from async_support import collect, open_async, run, until
from tiny import TEXT, open_model

from patience import PATIENCE
from quire import LLM, EngineArgs, SamplingParams
from quire.cli.main import main
from quire.engine import client, node_agent
from quire.engine.handshake import connect, receive_json, send_json, terms_of
from quire.engine.node_agent import NodeAgent
from quire.engine.node_listener import NodeListener
from quire.types.errors import ConfigError, EngineError

PARAMS = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] + [
    SamplingParams(seed=seed, max_tokens=60, ignore_eos=True) for seed in range(5)
]


@pytest.fixture(autouse=True)
def _quick(quick, monkeypatch):
    monkeypatch.setattr(node_agent, "Child", client.Child)
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.005")


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Node:
    """The other node, with engines from `first` on."""

    def __init__(self, model, port, size, first, count):
        args = EngineArgs(str(model), data_parallel_size=size, data_parallel_rpc_port=port, engine_start_timeout=PATIENCE)
        self.agent = NodeAgent(args, first, count)
        self.ended = threading.Thread(target=self.agent.run)
        self.ended.start()

    def leave(self):
        self.agent._over.set()
        self.ended.join(PATIENCE)
        assert not self.ended.is_alive()


async def all_of(llm, rounds, **more):
    asked = [collect(llm, TEXT[i % 3], params, f"{rounds}-{i}", **more) for i, params in enumerate(PARAMS)]
    return [[*outputs][-1].outputs[0].token_ids for outputs in await asyncio.gather(*asked)]


def test_engines_of_another_node_are_lost_and_come_again(tiny_model, port, traces):
    node = Node(tiny_model, port, size=3, first=1, count=2)
    llm = open_async(tiny_model, data_parallel_size=3, data_parallel_size_local=1, data_parallel_rpc_port=port)
    others = llm.engines[1:]

    async def scene():
        nonlocal node
        await llm.wait_ready()
        alone = await all_of(llm, "alone", data_parallel_rank=0)
        assert await all_of(llm, "there", data_parallel_rank=1) == alone
        assert {engine.pages for engine in llm.engines} == {llm.engines[0].pages}
        for number, how in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
            engine = others[number]
            lost = engine.pid
            running = asyncio.create_task(all_of(llm, how.name, data_parallel_rank=1 + number))
            await until(lambda engine=engine: any(entry.reported for entry in engine._open.values()))
            os.kill(lost, how)
            assert await running == alone
            await until(lambda engine=engine: engine.restarts == 1 and engine.state == "ready")
            assert how.name in engine.last_loss and "(on 127.0.0.1)" in engine.last_loss and engine.pid != lost
        assert llm.replayed > 0 and llm.engines[0].restarts == 0

        running = asyncio.create_task(all_of(llm, "gone", data_parallel_rank=1))
        await until(lambda: others[0].num_open)
        await asyncio.to_thread(node.leave)
        assert await running == alone, "another engine had them"
        await until(lambda: [engine.state for engine in others] == ["restarting"] * 2)
        assert llm.state == "ready" and await all_of(llm, "less") == alone
        node = Node(tiny_model, port, size=3, first=1, count=2)
        await until(lambda: [engine.state for engine in others] == ["ready"] * 2)
        assert await all_of(llm, "again", data_parallel_rank=2) == alone

    run(scene(), llm)
    node.ended.join(PATIENCE)
    assert not node.ended.is_alive(), "it ends with machine 0"


def test_llm_with_an_engine_elsewhere(tiny_model, port):
    expected = [output.outputs[0].token_ids for output in open_model(tiny_model).generate(TEXT, PARAMS[0])]
    node = Node(tiny_model, port, size=2, first=1, count=1)
    small = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 64}
    llm = LLM(str(tiny_model), data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=port, **small)
    answers = llm.generate(TEXT * 2, PARAMS[0])
    assert [output.outputs[0].token_ids for output in answers] == expected * 2
    core = llm.llm_engine.core
    assert all(engine.stats is not None for engine in core.engines), "both had some"
    core.stop()
    node.ended.join(PATIENCE)
    assert not node.ended.is_alive()


def test_who_may_bring_an_engine(tiny_model, port, monkeypatch):
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", "schlüssel")
    terms = terms_of(EngineArgs(str(tiny_model)))
    node_listener = NodeListener(("127.0.0.1", port), range(1, 3), terms)

    def come(**said):
        with connect(node_listener.address, 0.0) as connection:
            send_json(connection, {"clock": 0.5, **terms, **said})
            return receive_json(connection, PATIENCE)

    try:
        assert "key" in come(engine=1, key="other")["refused"]
        assert "engine 3 is not one of those of other nodes, 1 to 2" in come(engine=3, key="schlüssel")["refused"]
        with connect(node_listener.address, 0.0) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert come(engine=2, key="schlüssel") == {"engine": 2}
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1, port {port}"):
            NodeListener(("127.0.0.1", port), range(1, 3), terms)
    finally:
        node_listener.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "are more than all of them, data_parallel_size=2"),
        ({"data_parallel_size": 2, "data_parallel_start_rank": 1}, "run quire serve with --headless on it"),
        ({"data_parallel_backend": "ray"}, "requires a data_parallel_size of at least 2; got 1"),
        ({"data_parallel_size": 2, "nnodes": 2, "tensor_parallel_size": 2}, "is not supported with nnodes=2; leave nnodes out"),
    ],
)
def test_what_cannot_be_had(tiny_model, values, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), device="cpu", **values)


def test_headless_engines_say_which_they_are(capsys):
    assert main(["serve", "x", "--headless", "-dp", "2", "-dpr", "1", "--data-parallel-backend", "ray"]) == 2
    assert "--headless is not supported with data_parallel_backend=ray" in capsys.readouterr().err
    for flags in (["-dp", "2"], ["-dp", "2", "-dpr", "2"], ["-dp", "4", "-dpr", "2", "-dpl", "3"]):
        assert main(["serve", "x", "--headless", *flags]) == 2
        assert "Give the number of the first, --data-parallel-start-rank" in capsys.readouterr().err
