"""Engines and ranks that are killed and stopped under load, again and again: every stream goes on, and nothing is left."""

import asyncio
import importlib.util
import random
import signal
from pathlib import Path

import pytest
from tiny import shared_files

import selection
from patience import wait_for
from quire.async_llm import AsyncLLM
from quire.config.args import EngineArgs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "losses.py"
TIMES, SEED = (20 if selection.ALL else 5), 11  # with it come engines and ranks, killed and stopped
RARELY = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)  # a stop takes a second to be noticed


@pytest.fixture(scope="module")
def losses():
    spec = importlib.util.spec_from_file_location("losses", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_streams_go_on_whoever_is_lost(tiny_model, losses):
    async def run():
        args = EngineArgs(
            model=str(tiny_model), device="cpu", dtype="float32", tensor_parallel_size=2, kv_cache_memory_bytes=4 << 20,
            max_engine_restarts=100, warm_restart=True,
        )  # fmt: skip
        llm = AsyncLLM.from_engine_args(args)
        try:
            load = losses.Load(llm, streams=3, tokens=60)
            load.expected = [await load.once(i) for i in range(3)]
            running = [asyncio.create_task(load.run(i)) for i in range(3)]
            await losses.wait_warm()
            waits = await losses.lose(load, random.Random(SEED), TIMES, RARELY, tell=False)
            load.over = True
            await asyncio.gather(*running)
        finally:
            llm.shutdown()
        assert load.wrong == 0 and load.ended >= 3
        assert llm.restarts == sum(map(len, waits.values())) == TIMES
        assert await losses.none_left() == {}

    before = shared_files()
    asyncio.run(run())
    wait_for(lambda: shared_files() <= before)  # other programs use the folder too
