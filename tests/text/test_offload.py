"""Text work beside an event loop: nothing a template or a text does holds it up, ends it, or ends the work of others."""

import asyncio
import errno
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from patience import PATIENCE, wait_for
from quire.proc.spawn import processor_time
from quire.text import offload as offload_module
from quire.text.offload import TextOffload
from quire.text.tokenizer_files import read_tokenizer
from quire.text.workers import pool, worker
from quire.text.workers.wire import Cut, Ids, Parse
from quire.types.errors import EngineError, InvalidParameter, PromptTooLong, RequestError

USER = [{"role": "user", "content": "hello"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{{ 'a' | center(10 ** 10) }}"
IN_C = "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}"
HEAVY_WHEN_IT_REFUSES = """
import sys
from quire.text.workers import wire, worker

refusal = wire.refusal

def refuse(error):
    worker.HEAVY = 0
    return refusal(error)

wire.refusal = refuse
worker.main(sys.argv[1:])
"""
DEADLY_TO_RENDER = """
import os, sys
from quire.text.workers import worker

worker.TextWorker._render = lambda *_: os._exit(1)
worker.main(sys.argv[1:])
"""
PLENTY = Parse(64, 1000, 10000, 100000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("offload")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ word }}"
    (directory / "tokenizer_config.json").write_text(f'{{"chat_template": "{template}"}}')
    return directory


def with_aside(model: Path, work: Callable[[TextOffload], Awaitable[None]]) -> None:
    files = SimpleNamespace(path=model)
    args = SimpleNamespace(tokenizer=None, tokenizer_revision=None)
    config: Any = SimpleNamespace(args=args, facts=SimpleNamespace(files=files))
    offload = TextOffload(config, read_tokenizer(model))

    async def run() -> None:
        await work(offload)

    try:
        asyncio.run(run())
    finally:
        offload.stop()


async def rendered(offload: TextOffload, template: str | None = None, **options: Any) -> str:
    return (await offload.render(USER, add_special_tokens=False, chat_template=template, **options))[0]


def test_templates_render_as_in_this_process(model):
    async def work(offload: TextOffload) -> None:
        text, count, ids = await offload.render(USER, add_special_tokens=False, variables={"word": "é€"})
        assert text == "<user>helloé€" and count == len(text.encode())
        assert ids == read_tokenizer(model).encode(text, add_special_tokens=False)
        big = {"n": 10**30, "deep": [[[{"a": None}]]]}
        assert (
            await rendered(offload, "{{ x.n }} {{ x | tojson }}", variables={"x": big})
            == f'{10**30} {{"n": {10**30}, "deep": [[[{{"a": null}}]]]}}'
        )
        with pytest.raises(RequestError, match="not today") as caught:
            await rendered(offload, "{{ raise_exception('not today') }}")
        assert caught.value.parameter == "messages"
        with pytest.raises(RequestError, match="not valid Jinja"):
            await rendered(offload, "{% if %}")
        with pytest.raises(RequestError, match="lone surrogate"):
            await rendered(offload, variables={"x": "\ud800"})
        with pytest.raises(PromptTooLong, match="wrote 11 characters"):
            await rendered(offload, most=10)

    with_aside(model, work)


def test_long_texts_are_the_same_in_a_process(model):
    async def work(offload: TextOffload) -> None:
        tokenizer = read_tokenizer(model)
        text = "héllo ☃ " * 10000
        expected = tokenizer.encode(text)
        assert len(text) > tokenizer.short
        assert await offload.encode(text, True) == (len(expected), expected)
        assert await offload.encode(text, True, Cut(10)) == (len(expected), None)
        assert await offload.encode(text, True, Cut(10, keep=7)) == (len(expected), expected[-7:])
        assert await offload.encode(text, True, Cut(10, keep=7, right=True)) == (len(expected), expected[:7])
        assert await offload.encode("ab", True, Cut(1)) == (2, None)
        assert await offload.decode(expected, False) == text
        message = [{"role": "user", "content": text}]
        assert (await offload.render(message, add_special_tokens=False))[2] == tokenizer.encode("<user>" + text)
        with pytest.raises(RequestError, match="lone surrogate"):
            await offload.encode(text + "\ud800", True)

    with_aside(model, work)


def test_json_is_the_same_from_a_process(model):
    async def work(offload: TextOffload) -> None:
        raw = b'{"a": [1, 2.5, null, true, "\\u00e9"], "n": 123456789012345678901234567890, "l": "' + b"x\\n" * 50000 + b'"}'
        value = await offload.parse(raw, PLENTY)
        assert value == {"a": [1, 2.5, None, True, "é"], "n": 123456789012345678901234567890, "l": "x\n" * 50000}
        numbers = await offload.parse(b"[" + b"7,-9," * 30000 + b"123456789]", PLENTY)
        assert type(numbers) is Ids and numbers == [7, -9] * 30000 + [123456789]
        assert (numbers.least, numbers.greatest) == (-9, 123456789)
        big = b"[" + b"1," * 20 + b"99999999999999999999]"
        assert await offload.parse(big, PLENTY) == [1] * 20 + [99999999999999999999]
        for bad, why in (
            (b"[" * 100 + b"]" * 100, "64 deep"), (b"[" * 100000, "not valid JSON|deep"),
            (b"[" + b"[]," * 1000 + b"1]", "1000 arrays"),
            (b"[" + b'"a",' * 10000 + b"1]", "10000 values"), (b"[" + b"1," * 100000 + b"1]", "100000 integers"),
            (b'{"a": NaN}', "not valid JSON"), (b'"\\ud800"', "not valid JSON"), (b'{"a": 1e400}', "not valid JSON"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=why) as caught:
                await offload.parse(bad, PLENTY)
            assert caught.value.parameter == "body"

    with_aside(model, work)


@pytest.mark.parametrize(
    "template, why", [(LOOP, "too long|too much processor"), (GROW, "memory"), (IN_C, "too long|memory|processor")]
)
def test_a_template_is_bounded(model, monkeypatch, template, why):
    monkeypatch.setenv("QUIRE_TEMPLATE_SECONDS", "1")

    async def work(offload: TextOffload) -> None:
        with pytest.raises(InvalidParameter, match=why) as caught:
            await rendered(offload, template)
        assert caught.value.parameter == "messages"
        assert await rendered(offload) == "<user>hello"

    with_aside(model, work)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ '\\ud800' }}", "halves of characters"),
        ("{{ raise_exception('\\ud800 no') }}", r"\? no"),
        ("{{ raise_exception('x' * 1000000) }}", "xxx"),
    ],
)
def test_what_a_template_wrote_can_be_told(model, template, why):
    async def work(offload: TextOffload) -> None:
        pids = set()
        for _ in range(3):
            with pytest.raises(RequestError, match=why) as caught:
                await rendered(offload, template)
            assert len(str(caught.value)) < 10000
            pids.update(offload.pids)
        assert len(pids) == 1  # it did not die of that

    with_aside(model, work)


def test_looping_templates_leave_room_for_others(model):
    async def work(offload: TextOffload) -> None:
        looping = [asyncio.create_task(rendered(offload, LOOP)) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert [await rendered(offload) for _ in range(3)] == ["<user>hello"] * 3
        assert not any(task.done() for task in looping)
        for task in looping:
            task.cancel()
        await asyncio.gather(*looping, return_exceptions=True)

    with_aside(model, work)


def test_a_burst_of_short_jobs_starts_no_more_processes(model, monkeypatch):
    monkeypatch.setattr(pool, "GROW_AFTER_S", 600.0)

    async def work(offload: TextOffload) -> None:
        assert await asyncio.gather(*[rendered(offload) for _ in range(8)]) == ["<user>hello"] * 8
        assert len(offload.pids) == 1

    with_aside(model, work)


def test_tenants_take_turns_and_nobody_overtakes(model, monkeypatch):
    monkeypatch.setattr(offload_module, "MAX_QUICK", 1)

    async def work(offload: TextOffload) -> None:
        done: list[str] = []

        async def job(name: str) -> None:
            pool.current_tenant.set(name[0])
            await rendered(offload)
            done.append(name)
            if name == "a1":
                await job("a5")  # the process has just been given back, and others wait for it

        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        await asyncio.gather(*[asyncio.create_task(job(name)) for name in names])
        assert done == ["a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5"] or done == [
            "a1",
            "a2",
            "b1",
            "c1",
            "a3",
            "b2",
            "a4",
            "a5",
        ]

    with_aside(model, work)


def test_a_killed_process_is_replaced_and_its_job_is_done(model):
    async def work(offload: TextOffload) -> None:
        assert await rendered(offload) == "<user>hello"
        [pid] = offload.pids
        os.kill(pid, signal.SIGKILL)
        assert await rendered(offload) == "<user>hello"
        assert pid not in offload.pids
        [pid] = offload.pids
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(rendered(offload))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert await waiting == "<user>hello"

    with_aside(model, work)


def run_instead(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    monkeypatch.setattr(pool, "COMMAND", command)


@pytest.mark.skipif(processor_time(os.getpid()) is None, reason="what a process did is not known here")
def test_a_process_that_stands_still_is_replaced(model, monkeypatch):
    monkeypatch.setattr(pool, "HANG_TIMEOUT_S", 1.5)  # a start beside busy neighbours has its moments

    async def work(offload: TextOffload) -> None:
        assert await rendered(offload) == "<user>hello"
        [pid] = offload.pids
        os.kill(pid, signal.SIGSTOP)
        assert await asyncio.wait_for(rendered(offload), PATIENCE) == "<user>hello"
        assert pid not in offload.pids and not _runs(pid)

    with_aside(model, work)


def test_a_job_that_loses_two_processes_is_refused(model, monkeypatch):
    run_instead(monkeypatch, sys.executable, "-P", "-c", DEADLY_TO_RENDER)

    async def work(offload: TextOffload) -> None:
        with pytest.raises(InvalidParameter, match="two processes were lost"):
            await rendered(offload)
        with pytest.raises(InvalidParameter, match="two processes were lost"):
            await rendered(offload)

    with_aside(model, work)


def test_processes_that_cannot_run_are_not_the_clients_mistake(model, monkeypatch):
    run_instead(monkeypatch, "/bin/false")

    async def work(offload: TextOffload) -> None:
        asked = [rendered(offload) for _ in range(3)]
        outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE)
        assert [type(outcome) for outcome in outcomes] == [EngineError] * 3

    with_aside(model, work)


def test_processes_that_were_killed_while_idle_cost_nobody_anything(model, monkeypatch):
    monkeypatch.setattr(pool, "GROW_AFTER_S", 0.0)

    async def work(offload: TextOffload) -> None:
        while len(offload.pids) < 2:
            await asyncio.gather(*[rendered(offload) for _ in range(8)])
        killed = offload.pids  # one that is only starting may be among them
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        while any(_runs(pid) for pid in killed):
            await asyncio.sleep(0.02)
        assert await rendered(offload) == "<user>hello"

    with_aside(model, work)


def test_a_process_that_was_killed_while_it_started_costs_nobody_anything(model):
    async def work(offload: TextOffload) -> None:
        asked = asyncio.create_task(rendered(offload))
        while not offload.pids:
            await asyncio.sleep(0)
        os.kill(offload.pids[0], signal.SIGKILL)
        assert await asked == "<user>hello"

    with_aside(model, work)


def test_a_process_that_ends_with_a_refusal_is_not_used_again(model, monkeypatch):
    """Nor is it held against the next job."""
    run_instead(monkeypatch, sys.executable, "-P", "-c", HEAVY_WHEN_IT_REFUSES)

    async def work(offload: TextOffload) -> None:
        bad = [offload.parse(b"{", PLENTY) for _ in range(2)]
        assert [type(error) for error in await asyncio.gather(*bad, return_exceptions=True)] == [InvalidParameter] * 2
        assert offload.pids == []
        assert await offload.parse(b"[1]", PLENTY) == [1]

    with_aside(model, work)


def test_what_the_server_holds_is_not_counted_as_its_processes(model):
    """Linux hands the largest size of a process on to those it starts."""
    held = b"x" * (worker.HEAVY + 2**26)

    async def work(offload: TextOffload) -> None:
        assert await offload.parse(b"[1]", PLENTY) == [1]
        process = offload.pids
        assert len(process) == 1
        assert await offload.parse(b"[2]", PLENTY) == [2] and offload.pids == process

    async def within_reason(offload: TextOffload) -> None:
        await asyncio.wait_for(work(offload), PATIENCE)

    with_aside(model, within_reason)
    assert held


def test_a_process_does_not_hold_the_last_body(model):
    def held(pid: int) -> int:
        [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) << 10

    async def work(offload: TextOffload) -> None:
        assert await offload.parse(b"[1]", PLENTY) == [1]
        [pid] = offload.pids
        before, size = held(pid), 32 << 20
        assert await offload.parse(b'["' + b"a" * size + b'"]', PLENTY) == ["a" * size]
        assert offload.pids == [pid]
        await asyncio.to_thread(wait_for, lambda: held(pid) < before + size // 4)

    with_aside(model, work)


def test_a_start_that_fails_or_is_given_up_makes_room_for_those_who_wait(model, monkeypatch):
    monkeypatch.setattr(offload_module, "MAX_QUICK", 1)
    may_start, real = threading.Event(), pool.WorkerHandle.__init__
    failing = True

    def start(self: pool.WorkerHandle, where: str, lasting: bool = False) -> None:
        assert may_start.wait(PATIENCE)
        if failing:
            raise OSError(errno.EMFILE, "too many open files")
        real(self, where, lasting)

    monkeypatch.setattr(pool.WorkerHandle, "__init__", start)

    async def work(offload: TextOffload) -> None:
        nonlocal failing
        asked = [asyncio.create_task(rendered(offload)) for _ in range(3)]
        await asyncio.sleep(0.05)
        asked[0].cancel()
        may_start.set()
        outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, EngineError, EngineError]
        failing = False
        assert await rendered(offload) == "<user>hello"

    with_aside(model, work)


def test_what_nobody_waits_for_is_ended(model, monkeypatch):
    monkeypatch.setattr(pool, "ABANDONED_JOB_S", 0.2)
    monkeypatch.setattr(offload_module, "MAX_LONG", 2)

    async def work(offload: TextOffload) -> None:
        assert await rendered(offload, "a") == "a"
        [pid] = offload.pids
        task = asyncio.create_task(rendered(offload, LOOP))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while offload.pids:
            await asyncio.sleep(0.02)
        while _runs(pid):
            await asyncio.sleep(0.02)

    with_aside(model, work)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False
