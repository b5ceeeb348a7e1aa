"""The engine may die, freeze or hang: requests go on where they were, or are told that they cannot."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from async_support import FAULTY, collect, open_async, processes, run, until
from tiny import TEXT

from patience import PATIENCE
from quick_engines import held_back
from quire import RequestOutputKind, SamplingParams
from quire.engine import client
from quire.engine.child import Child
from quire.engine.ipc import StepReport
from quire.engine.supervisor import Supervisor, SupervisorLimits
from quire.types.errors import ConfigError, EngineDead, EngineError
from quire.types.outputs import TokenDelta
from quire.types.stats import Stats

DELTA = RequestOutputKind.DELTA
pytestmark = pytest.mark.usefixtures("quick", "traces")
POISON = 300  # a token of the tiny vocabulary that no answer below contains


def many(count: int, **more) -> list[tuple[str, SamplingParams]]:
    """Prompts and parameters of all kinds, greedy and seeded, whole and in pieces."""
    out = []
    for i in range(count):
        params = {"max_tokens": 60 + i % 7, "ignore_eos": True, "output_kind": DELTA if i % 2 else RequestOutputKind.CUMULATIVE}
        params |= {"temperature": 0.0} if i % 3 == 0 else {"temperature": 1.1, "seed": i, "n": 1 + (i % 5 == 0)}
        params |= {"logprobs": 2} if i % 4 == 0 else {}
        params |= {"prompt_logprobs": 1} if i % 6 == 0 else {}
        params |= {"repetition_penalty": 1.2, "min_tokens": 30} if i % 5 == 1 else {}
        out.append((f"{TEXT[i % 3]} {i}", SamplingParams(**(params | more))))
    return out


@dataclass
class Story:
    """Everything one request ever told, put together."""

    prompt: list[int] = field(default_factory=list)
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, str | None] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=lambda: defaultdict(list))
    scores: list = field(default_factory=list)

    def add(self, output, delta: bool) -> None:
        self.prompt, self.scores = output.prompt_token_ids, output.prompt_logprobs or []
        for choice in output.outputs:
            if not delta:
                self.text[choice.index], self.tokens[choice.index], self.logprobs[choice.index] = "", [], []
            self.text[choice.index] += choice.text
            self.tokens[choice.index] += choice.token_ids
            self.logprobs[choice.index] += choice.logprobs or []
            self.reasons[choice.index] = choice.finish_reason

    def same(self, other: "Story") -> bool:
        """Logprobs may differ a little: batches of other sizes round differently."""
        mine, theirs = ([*s.scores, *(t for i in sorted(s.logprobs) for t in s.logprobs[i])] for s in (self, other))
        for a, b in zip(mine, theirs, strict=True):
            assert {i: e.logprob for i, e in (a or {}).items()} == pytest.approx(
                {i: e.logprob for i, e in (b or {}).items()}, abs=1e-3
            )
        return (self.prompt, self.text, self.tokens, self.reasons) == (other.prompt, other.text, other.tokens, other.reasons)


async def follow(llm, prompt, params, name, watch=None) -> Story:
    story = Story()
    async for output in llm.generate(prompt, params, name):
        story.add(output, params.output_kind is DELTA)
        if watch is not None:
            watch(sum(map(len, story.tokens.values())))
    return story


def kill(llm, sign=signal.SIGKILL):
    os.kill(llm.engine_pid, sign)


@pytest.mark.parametrize("backend", ["fake", "uni"])
def test_a_killed_engine_is_only_a_pause_for_32_streams(tiny_model, backend, monkeypatch):
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.003")
    llm = open_async(tiny_model, backend=backend, max_num_seqs=16, long_prefill_token_threshold=8, max_num_batched_tokens=48)
    work = many(32)
    kills = {200, 1200}  # tokens of all together

    async def scene():
        await llm.wait_ready()
        undisturbed = await asyncio.gather(*(follow(llm, *job, f"a{i}") for i, job in enumerate(work)))
        assert llm.restarts == 0
        heard: dict[int, int] = {}

        def watch(name, tokens):
            heard[name] = tokens
            if kills and sum(heard.values()) >= min(kills):
                kills.remove(min(kills))
                kill(llm)

        disturbed = await asyncio.gather(
            *(follow(llm, *job, f"b{i}", lambda tokens, i=i: watch(i, tokens)) for i, job in enumerate(work))
        )
        assert llm.restarts == 2 and llm.state == "ready" and not kills
        assert all(after.same(before) for before, after in zip(undisturbed, disturbed, strict=True))
        await until(lambda: llm.stats.running == 0)
        assert llm.stats.free_pages == llm.pages and llm.num_open == 0

    run(scene(), llm)


def test_a_frozen_engine_is_noticed_and_replaced(tiny_model):
    llm = open_async(tiny_model, engine_dead_after=3.0)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def scene():
        [*_, whole] = await collect(llm, TEXT[0], params, "whole")
        pid, ages = llm.engine_pid, []
        stream = llm.generate(TEXT[0], params, "paused")
        await anext(stream)
        kill(llm, signal.SIGSTOP)
        while llm.engine_pid == pid:
            ages.append(llm.heartbeat_age)
            await asyncio.sleep(0.05)
        assert max(ages) == ages[-1] > 0.4
        assert [o async for o in stream][-1].outputs[0].token_ids == whole.outputs[0].token_ids
        assert (llm.restarts, llm.state) == (1, "ready") and llm.heartbeat_age < 3.0

    run(scene(), llm)


def test_our_own_pauses_are_not_held_against_the_engine(tiny_model):
    llm = open_async(tiny_model, engine_dead_after=1.9)

    async def scene():
        await llm.wait_ready()
        time.sleep(2.0)  # the event loop itself is blocked
        await asyncio.sleep(0.5)
        assert (llm.restarts, llm.state) == (0, "ready")

    run(scene(), llm)


def test_a_hung_step_is_told_apart_from_a_frozen_process(tiny_model, tmp_path, caplog):
    caplog.set_level("INFO", "quire")
    llm = open_async(tiny_model, "hang", tmp_path / "once", engine_hang_timeout=2.0, engine_dead_after=30.0)

    async def scene():
        [*_, last] = await collect(llm, TEXT[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), "x")
        assert last.outputs[0].finish_reason == "length" and llm.restarts == 1
        [*_, again] = await collect(llm, TEXT[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), "y")
        assert again.outputs[0].token_ids == last.outputs[0].token_ids

    run(scene(), llm)
    assert "in one step for" in caplog.text and "silent" not in caplog.text
    assert re.search(r"the engine is back after \d+\.\d s; 1 open request continues", caplog.text)


def test_busy_for_says_how_long_a_step_takes(tiny_model, tmp_path):
    llm = open_async(tiny_model, "hang", tmp_path / "once", engine_hang_timeout=3.0)

    async def scene():
        await llm.wait_ready()
        await asyncio.sleep(0.6)
        assert llm.busy_for == 0.0
        task = asyncio.create_task(collect(llm, TEXT[0], SamplingParams(max_tokens=20), "x"))
        await until(lambda: llm.busy_for > 0.8)
        assert llm.heartbeat_age < 2.0 and llm.state == "ready"
        await task

    run(scene(), llm)


def test_settings_the_engine_finds_impossible(tiny_model, capsys):
    llm = open_async(tiny_model, kv_cache_memory_bytes=10)

    async def scene():
        with pytest.raises(ConfigError, match="not enough for one page"):
            await llm.wait_ready()
        assert llm.state == "dead"
        with pytest.raises(EngineDead, match="not enough for one page"):
            await llm.check_health()
        with pytest.raises(EngineDead, match="not enough for one page"):
            await collect(llm, "x", SamplingParams(), "x")

    run(scene(), llm)
    assert "Traceback" not in capsys.readouterr().err


def test_an_engine_that_dies_while_it_starts(tiny_model, capsys):
    llm = open_async(tiny_model, "start", "exit")

    async def scene():
        with pytest.raises(EngineDead, match=r"could not start: its process ended with exit code 3\n  the disk is on fire"):
            await collect(llm, "x", SamplingParams(), "x")
        assert llm.restarts == 0

    run(scene(), llm)
    assert "the disk is on fire" in capsys.readouterr().err


def test_an_unforeseen_error_while_it_starts_has_one_traceback(tiny_model, capsys):
    llm = open_async(tiny_model, "start", "raise")

    async def scene():
        pid = llm.engine_pid
        with pytest.raises(EngineError, match="KeyError: 'no such thing'"):
            await llm.wait_ready()
        return pid

    pid = run(scene(), llm)
    lines = capsys.readouterr().err.splitlines()
    assert sum("Traceback" in line for line in lines) == 1
    assert all(line.startswith(f"(engine {pid}) ") for line in lines)


def test_an_engine_that_dies_again_and_again_is_given_up(tiny_model):
    llm = open_async(tiny_model, "step", 8, max_engine_restarts=2)

    async def scene():
        jobs = [collect(llm, TEXT[i % 3], SamplingParams(max_tokens=50, ignore_eos=True), f"{i}") for i in range(4)]
        for outputs in await asyncio.gather(*jobs):
            [choice] = outputs[-1].outputs
            assert outputs[-1].finished and choice.finish_reason == "error" and "restarted 2 times" in choice.error
            assert 3 <= len(choice.token_ids) <= 24  # each of the three engines got a little further
        assert (llm.state, llm.restarts, llm.num_open, llm.engine_pid) == ("dead", 2, 0, None)
        with pytest.raises(EngineDead, match="exit code 9"):
            await llm.check_health()
        with pytest.raises(EngineDead, match="exit code 9"):
            await collect(llm, "x", SamplingParams(), "x")

    run(scene(), llm)


def test_restarts_that_fail_are_counted_too(tiny_model, tmp_path):
    llm = open_async(tiny_model, "once", tmp_path / "started", max_engine_restarts=2)

    async def scene():
        stream = llm.generate(TEXT[0], SamplingParams(max_tokens=200, ignore_eos=True), "x")
        await anext(stream)
        kill(llm)
        last = [output async for output in stream][-1].outputs[0]
        assert last.finish_reason == "error" and "exit code 4" in last.error
        assert (llm.state, llm.restarts) == ("dead", 2)

    run(scene(), llm)


def test_old_restarts_are_forgotten(tiny_model):
    llm = open_async(tiny_model, max_engine_restarts=1, engine_restart_window=0.8)

    async def scene():
        await llm.wait_ready()
        for restarts in (1, 2):
            kill(llm)
            await until(lambda count=restarts: llm.restarts == count)
            await llm.wait_ready()
            await asyncio.sleep(0.9)

    run(scene(), llm)


@pytest.mark.parametrize(
    ("fault", "prefix", "seats", "restarts"),
    [
        ("poison", (POISON,), 64, 3),  # its prompt kills engines
        ("poison", (POISON,), 1, 3),  # ... while the others wait
        ("poison", (), 64, 4),  # it does so with a token it samples
        ("schedule", (POISON,), 2, 3),  # it need only wait
    ],
)
def test_a_poisonous_request_fails_alone(tiny_model, fault, prefix, seats, restarts, monkeypatch):
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.002")
    good = [([i, i + 1, i + 2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for i in range(2, 14)]
    poisonous = ([*prefix, 5, 6], SamplingParams(temperature=0, max_tokens=30))
    healthy = open_async(tiny_model)

    async def play(llm):
        bad, *rest = await asyncio.gather(*(collect(llm, *job, f"{i}") for i, job in enumerate([poisonous, *good])))
        return bad[-1].outputs[0], [outputs[-1].outputs[0].token_ids for outputs in rest]

    would_be, expected = run(play(healthy), healthy)
    elsewhere = {token for tokens in [*expected, would_be.token_ids[:8]] for token in tokens}
    deadly = POISON if prefix else next(token for token in would_be.token_ids[8:] if token not in elsewhere)
    llm = open_async(tiny_model, fault, deadly, max_num_seqs=seats)

    async def scene():
        last, found = await play(llm)
        assert found == expected
        assert last.finish_reason == "error" and "lost 3 times in a row" in last.error
        assert last.token_ids == ([] if prefix else would_be.token_ids[: would_be.token_ids.index(deadly) + 1])
        await llm.wait_ready()
        assert llm.restarts == restarts

    run(scene(), llm)


def test_a_request_that_cannot_be_added_fails_alone(tiny_model, capsys):
    llm = open_async(tiny_model, "add", POISON)

    async def scene():
        with pytest.raises(EngineError, match="ZeroDivisionError: on order"):
            await collect(llm, [POISON], SamplingParams(), "bad")
        [*_, last] = await collect(llm, [5], SamplingParams(max_tokens=3, ignore_eos=True), "good")
        assert last.outputs[0].finish_reason == "length" and llm.restarts == 0

    run(scene(), llm)
    assert capsys.readouterr().err.count("Traceback") == 1


def test_requests_and_aborts_during_a_restart(tiny_model):
    llm = open_async(tiny_model)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def scene():
        [*_, whole] = await collect(llm, TEXT[0], params, "whole")
        streams = [llm.generate(TEXT[0], params, f"s{i}") for i in range(3)]
        for stream in streams:
            await anext(stream)
        with held_back(llm.engines[0].supervisor):
            kill(llm)
            await until(lambda: llm.state == "restarting")
            added = asyncio.create_task(collect(llm, TEXT[0], params, "added"))
            gone = asyncio.create_task(collect(llm, TEXT[0], params, "gone"))
            reset = asyncio.create_task(llm.reset_prefix_cache())
            await until(lambda: llm.num_open == 5)
            assert llm.state == "restarting"
            await streams[0].aclose()
            await llm.abort("s1")
            gone.cancel()
        rest = [[o async for o in stream][-1].outputs[0] for stream in streams[1:]]
        assert rest[0].finish_reason == "abort" and rest[1].token_ids == whole.outputs[0].token_ids
        assert (await added)[-1].outputs[0].token_ids == whole.outputs[0].token_ids
        assert isinstance(await reset, bool) and llm.restarts == 1 and llm.num_open == 0
        await until(lambda: llm.stats.free_pages == llm.pages)

    run(scene(), llm)


def test_shutdown_during_a_restart(tiny_model, traces):
    llm = open_async(tiny_model)

    async def scene():
        stream = llm.generate(TEXT[0], SamplingParams(max_tokens=200, ignore_eos=True), "x")
        await anext(stream)
        with held_back(llm.engines[0].supervisor):
            kill(llm)
            await until(lambda: llm.state == "restarting")
            llm.shutdown()
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
        await asyncio.sleep(0.5)
        assert llm.state == "dead" and processes(traces.room) == []

    run(scene(), llm)


def test_a_restart_does_not_depend_on_where_we_are(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "Child", Child)  # one that is started, not forked
    monkeypatch.chdir(tiny_model.parent)
    llm = open_async(Path(tiny_model.name))
    (tmp_path / "msgspec.py").write_text("raise SystemExit('a stranger')")

    async def scene():
        await llm.wait_ready()
        monkeypatch.chdir(tmp_path)
        kill(llm)
        await until(lambda: llm.restarts == 1)
        await llm.wait_ready()

    run(scene(), llm)


def test_an_event_loop_that_ends_during_a_restart(tiny_model):
    llm = open_async(tiny_model)

    async def first():
        await llm.wait_ready()
        with held_back(llm.engines[0].supervisor):
            kill(llm)
            await until(lambda: llm.state == "restarting")

    asyncio.run(first())
    [*_, last] = run(collect(llm, TEXT[0], SamplingParams(max_tokens=5, ignore_eos=True), "x"), llm)
    assert last.outputs[0].finish_reason == "length"


def test_signals_to_the_engine_alone(tiny_model):
    llm = open_async(tiny_model)

    async def scene():
        await llm.wait_ready()
        kill(llm, signal.SIGINT)
        await asyncio.sleep(0.7)
        assert (llm.state, llm.restarts) == ("ready", 0)
        kill(llm, signal.SIGTERM)
        await until(lambda: llm.restarts == 1)
        await llm.wait_ready()

    run(scene(), llm)


def test_the_engine_does_not_outlive_its_parent(tiny_model, traces):
    code = f"""
import asyncio, os, signal, sys, tempfile
tempfile.tempdir = {str(traces.room)!r}
sys.path[:0] = {[str(place) for place in Path(FAULTY[1]).parents[:2]]!r}
from async_support import open_async
async def main():
    llm = open_async({str(tiny_model)!r})
    await llm.wait_ready()
    print(llm.engine_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert parent.returncode == -signal.SIGKILL and parent.stdout.strip().isdigit()
    deadline = time.monotonic() + PATIENCE
    while processes(traces.room) or list(traces.room.iterdir()):
        assert time.monotonic() < deadline, "the engine is still there"
        time.sleep(0.02)


def test_a_parent_that_just_ends_leaves_nothing(tiny_model, traces):
    code = f"""
import asyncio, sys, tempfile
tempfile.tempdir = {str(traces.room)!r}
sys.path[:0] = {[str(place) for place in Path(FAULTY[1]).parents[:2]]!r}
from async_support import open_async
llm = open_async({str(tiny_model)!r})
asyncio.run(llm.wait_ready())
"""
    parent = subprocess.run([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE, check=False)
    assert (parent.returncode, parent.stderr) == (0, b"")
    assert not processes(traces.room) and not list(traces.room.iterdir())


def test_a_large_report_does_not_hold_the_event_loop():
    class Listener:
        def __init__(self):
            self.chunks, self.turns, self.seen = [], 0, []

        def on_deltas(self, deltas):
            self.chunks.append([delta.request_id for delta in deltas])
            self.seen.append(self.turns)

        def on_step(self, report):
            assert sum(map(len, self.chunks)) == len(report.deltas)

    listener = Listener()
    supervisor = Supervisor(lambda: None, SupervisorLimits(1.0, 1.0, 1.0, 0, 1.0), listener)
    deltas = [TokenDelta(f"{i}", [i]) for i in range(1000)]

    async def others():
        while True:
            listener.turns += 1
            await asyncio.sleep(0)

    async def scene():
        task = asyncio.create_task(others())
        await supervisor._handle(StepReport(deltas, Stats(1, 0, 1, 1, 0, 0, 0), 1000))
        task.cancel()

    run(scene())
    assert [name for chunk in listener.chunks for name in chunk] == [delta.request_id for delta in deltas]
    assert max(map(len, listener.chunks)) <= 128 and listener.seen == sorted(set(listener.seen))


@pytest.mark.parametrize(
    "want", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN], ids=["files", "files of all", "memory", "processes"]
)
def test_a_system_without_room_is_not_held_against_the_engine(tiny_model, monkeypatch, want):
    """Far more starts fail for want of descriptors, say, than restarts are allowed; then there are some again."""
    llm = open_async(tiny_model, max_engine_restarts=1, engine_restart_window=60.0)
    monkeypatch.setattr("quire.proc.liveness.MAX_BACKOFF_S", 0.01)
    supervisor = llm._client.supervisor
    begin, failed = supervisor._start, []

    def start():
        if len(failed) < 12:
            failed.append(1)
            raise OSError(want, os.strerror(want))
        return begin()

    async def scene():
        await llm.wait_ready()
        stream = asyncio.create_task(follow(llm, "a b", SamplingParams(max_tokens=200, ignore_eos=True), "a"))
        await until(lambda: llm.num_open)
        supervisor._start = start
        os.kill(supervisor.pid, signal.SIGKILL)
        story = await stream
        await until(lambda: llm.state == "ready" and llm.restarts == 1)
        assert len(story.tokens[0]) == 200 and len(failed) == 12

    run(scene(), llm)


def test_what_will_not_pass_is_counted(tiny_model, monkeypatch):
    llm = open_async(tiny_model, max_engine_restarts=3, engine_restart_window=60.0)
    monkeypatch.setattr("quire.proc.liveness.MAX_BACKOFF_S", 0.01)
    supervisor, tries = llm._client.supervisor, []

    def start():
        tries.append(1)
        raise FileNotFoundError(errno.ENOENT, "no such program")

    async def scene():
        await llm.wait_ready()
        supervisor._start = start
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: llm.state == "dead")
        assert len(tries) == 3

    run(scene(), llm)


def test_a_shutdown_ends_the_waiting_for_room(tiny_model):
    llm = open_async(tiny_model)
    supervisor, tries = llm._client.supervisor, []

    def start():
        tries.append(1)
        raise OSError(errno.EMFILE, "too many")

    async def scene():
        await llm.wait_ready()
        supervisor._start = start
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: tries)

    run(scene(), llm)
    assert llm.state == "dead"
