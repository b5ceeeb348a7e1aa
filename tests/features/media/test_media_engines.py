"""Engines in processes of their own that see: lost ones, several of them, and what is left in shared memory."""

import asyncio
import os
import random
import signal
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
from media_files import READER, reading
from random_conversations import ENGINE, TOLERANCE, Oracle, answer_of, conversations

from quire import SamplingParams
from quire.async_llm import AsyncLLM
from quire.config.args import EngineArgs
from quire.engine.client import EngineClient, OpenRequest
from quire.features.media.inputs import NO_OPTIONS, MediaRef
from quire.types.media import MediaArray, MediaItem
from quire.types.prompts import Extras
from quire.types.request import EngineRequest

PICTURE = (READER / "pictures" / "00.png").read_bytes()
TOKENS, TOGETHER, ASKED = 20, 6, 24


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


async def ask(llm, one, name):
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=-1)
    async for output in llm.generate(one.prompt, params, name):  # noqa: B007
        pass
    return answer_of(output)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def files_of(media):
    """Return the files of arrays."""
    return [path for path in media._files.directory.iterdir() if path.name not in ("owner", "source")]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("engines", [1, 2])
def test_answers_go_on_when_engines_are_killed(engines, oracle):
    """The next engine encodes the pictures again, whose values the API process still has: in shared memory, or for two engines
    as if that had no room."""
    rng = random.Random(engines)
    asked = conversations(ASKED, rng)
    args = EngineArgs(
        **ENGINE, data_parallel_size=engines, max_num_seqs=4, num_gpu_blocks_override=40, block_size=8,
        max_num_batched_tokens=64, mm_encoder_cache_size=48, max_engine_restarts=100,
    )  # fmt: skip

    async def scene():
        llm = AsyncLLM.from_engine_args(args)
        try:
            llm.media._inline = engines == 2
            await llm.wait_ready()
            gate = asyncio.Semaphore(TOGETHER)

            async def one(number):
                async with gate:
                    return await ask(llm, asked[number], f"{number}")

            tasks = [asyncio.create_task(one(number)) for number in range(ASKED)]
            for done in (2, 7, 14):
                await until(lambda done=done: sum(task.done() for task in tasks) >= done and llm.num_open > 2)
                engine, restarts = rng.choice(list(llm.engines)), llm.restarts
                await until(lambda engine=engine: engine.state == "ready")
                os.kill(engine.status.pid, signal.SIGKILL)
                await until(lambda restarts=restarts: llm.restarts > restarts)
            return await asyncio.gather(*tasks), llm.restarts, llm.status.replayed, files_of(llm.media)
        finally:
            llm.shutdown()

    answers, restarts, replayed, files = asyncio.run(asyncio.wait_for(scene(), 240))
    assert restarts == 3 and replayed > 0
    assert max(oracle.difference(one, answer) for one, answer in zip(asked, answers, strict=True)) < TOLERANCE
    assert bool(files) == (engines == 1) and not any(path.exists() for path in files)


def test_arrays_travel_with_requests_to_engines_on_other_machines():
    for more, remote in (({}, False), ({"data_parallel_size": 2}, False), ({"nnodes": 2, "tensor_parallel_size": 2}, True)):
        with reading(**more) as media:
            assert media.reader._inline == remote
    with reading(data_parallel_size=2, data_parallel_size_local=1) as media:
        [item] = media.run(media.reader.process([MediaRef("image", "", PICTURE)], NO_OPTIONS))
        [array] = item.arrays
        assert not array.path and len(array.data) == 3 * 32 * 32 * 4


def test_messages_to_engines_are_of_bounded_size(monkeypatch):
    """Requests with arrays of their own, for they may be sent to another machine."""
    array = MediaArray("pixel_values", "float32", (1 << 16,), bytes(1 << 18))
    extras = Extras(media=(MediaItem("image", 0, 4, "a", (array,)),))
    spec = EngineRequest("a", (1,) * 4, SamplingParams(), 0, frozenset(), frozenset(), 0.0, extras=extras)
    sent = []
    client = EngineClient.__new__(EngineClient)
    client._open = {f"{i}": OpenRequest(replace(spec, id=f"{i}")) for i in range(5)}
    client._outbox, client.replayed_requests, client._suspects = deque(client._open.values()), 0, deque()
    client.supervisor = SimpleNamespace(state="ready", send=lambda message: sent.append(len(message.requests)))

    async def scene():
        client._send_some()
        await until(lambda: sum(sent) == 5)

    asyncio.run(scene())
    assert sent == [1] * 5
