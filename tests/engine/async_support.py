"""AsyncLLM in tests: engines on the fake executor, whole answers, and the proof that nothing is left behind."""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from patience import PATIENCE
from quick_engines import FAULTY
from quire import AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from quire.config.resolve import resolve
from quire.device.registry import describe
from quire.engine.child import COMMAND

SMALL = {"device": "cpu", "block_size": 4, "max_num_seqs": 64, "max_num_batched_tokens": 256}


def open_async(model: Path, *fault: object, backend: str = "fake", **args) -> AsyncLLM:
    """An engine on the fake executor; `fault` is on order (faulty_engine.py)."""
    config = resolve(EngineArgs(str(model), distributed_executor_backend=backend, **(SMALL | args)), lambda: "cpu", describe)
    return AsyncLLM(config, (*FAULTY, *map(str, fault)) if fault else COMMAND)


def run(scene, llm: AsyncLLM | None = None, timeout: float = PATIENCE):
    """Runs a coroutine to its end, and the engine with it."""

    async def play():
        try:
            return await asyncio.wait_for(scene, timeout)
        finally:
            if llm is not None:
                llm.shutdown()

    return asyncio.run(play())


async def collect(llm: AsyncLLM, prompt, params: SamplingParams, name: str, **more) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, name, **more)]


async def until(condition: Callable[[], object], timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


class Traces:
    """What a process leaves behind: temporary directories, engine processes, open files, threads."""

    def __init__(self) -> None:
        self.room = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
        self._before = _open_things()

    def check(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, left
        self.room.rmdir()

    def _left(self) -> list[object]:
        return [*self.room.iterdir(), *processes(self.room), *(_open_things() - self._before)]


def processes(room: Path) -> list[int]:
    """Engine processes that were started in this room, where their journals are, and live."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid() and _has_open(entry, room):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [] if state == "Z" else [int(entry.name)]
    return found


def _has_open(process: Path, room: Path) -> bool:
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            if str(room) in str(descriptor.readlink()):
                return True
    return False


def _open_things() -> set[str]:
    things = {thread.name for thread in threading.enumerate()}
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            things.add(f"{fd.name} {fd.readlink()}")
    return things


class Crew:
    """One engine for many tests, on one event loop."""

    def __init__(self, model):
        self.runner = asyncio.Runner()
        self.llm = open_async(model)

    def __call__(self, scene):
        return self.runner.run(asyncio.wait_for(scene, PATIENCE))
