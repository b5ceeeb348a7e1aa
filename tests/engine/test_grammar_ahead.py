"""The grammar process of an engine that serves: there before anyone asks for it, at rest, and gone with its engine."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from async_support import collect, open_async, run, until

from quick_engines import GRAMMARS_AHEAD
from quire import AsyncLLM, SamplingParams
from quire.config.args import EngineArgs
from quire.engine.process import needs_grammars
from quire.sampling_params import StructuredOutputsParams

WORKER = "quire.features.structured.grammar.worker"
CHOICE = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.usefixtures("traces")]


def grammar_processes(engine: int | None) -> list[int]:
    """The one that the engine started, and what that has forked."""
    found = [child for child in children(engine) if WORKER in command(child)]
    return found + [forked for child in found for forked in children(child)]


def children(pid: int | None) -> list[int]:
    with suppress(OSError):
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return []


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def turns(pid: int) -> int:
    """How often it waited for something."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def rest(pids: list[int]) -> None:
    """Returns when none of them has had anything to do for a moment."""
    before, now = [-1], [turns(pid) for pid in pids]
    while before != now:
        await asyncio.sleep(0.3)
        before, now = now, [turns(pid) for pid in pids]


async def started(llm: AsyncLLM) -> list[int]:
    """Both: it, and the one that tries out grammars, which is forked last."""
    await llm.wait_ready()
    await until(lambda: len(grammar_processes(llm.engine_pid)) == 2)
    return grammar_processes(llm.engine_pid)


def test_it_is_there_before_it_is_asked_for_and_ends_with_the_engine(tiny_model, monkeypatch):
    monkeypatch.setenv(GRAMMARS_AHEAD, "1")
    llm = open_async(tiny_model, backend=None)

    async def scene():
        ahead = await started(llm)
        await rest(ahead)
        [answer] = (await collect(llm, [1, 2], CHOICE, "first"))[-1].outputs
        assert answer.text in ("yes", "no")
        assert grammar_processes(llm.engine_pid) == ahead, "nobody started another"
        os.kill(llm.engine_pid, signal.SIGKILL)
        await until(lambda: not any(lives(pid) for pid in ahead))
        assert set(await started(llm)).isdisjoint(ahead)

    run(scene(), llm)


def test_who_cannot_be_asked_for_it_has_none():
    assert needs_grammars(EngineArgs("model"))
    assert not needs_grammars(EngineArgs("model", skip_tokenizer_init=True))
    assert not needs_grammars(EngineArgs("model", distributed_executor_backend="fake"))
