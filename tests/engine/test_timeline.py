"""The parts of a start add up to its wall clock."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from async_support import run

from quire import AsyncLLM, EngineArgs
from quire.config.resolve import resolve
from quire.device.registry import describe
from quire.engine import timeline as module
from quire.engine.timeline import Stopwatch, Timeline, process_start
from quire.serve import launch


def total(timeline: Timeline) -> float:
    return sum(seconds for _, seconds in timeline.parts)


def test_laps_add_up_and_equal_names_are_one_part(monkeypatch):
    now = [8.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = Stopwatch()
    for name in ("imports", "configuration", "imports"):
        now[0] += 0.25
        watch.lap(name)
    assert watch.read() == Timeline([("imports", 0.5), ("configuration", 0.25)], 0.75, 8.0)


def test_time_without_a_name_is_shown_only_where_it_matters():
    assert Timeline.of([("load", 9.9)], 100.0, 110.0).parts == [("load", 9.9)]
    shown = Timeline.of([("load", 9.0)], 100.0, 110.0)
    assert shown.parts == [("load", 9.0), ("other", 1.0)]
    assert str(shown) == "10.00 s = load 9.00 + other 1.00"
    assert str(Timeline.of([("load", 0.996), ("device", 0.004)], 0.0, 1.0)) == "1.00 s = load 1.00"


def test_a_longer_stretch_names_what_came_before_and_after():
    engine = Timeline.of([("load", 2.0)], 103.0, 105.0)
    whole = engine.within(100.0, "command line", "open the API", 105.5)
    assert whole.parts == [("command line", 3.0), ("load", 2.0), ("open the API", 0.5)]
    assert (whole.began, whole.total) == (100.0, 5.5)


def test_a_timeline_survives_a_journey():
    sent = Timeline.of([("load", 2.0)], 103.0, 105.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Timeline) == sent


def test_only_the_first_engine_of_a_process_is_charged_with_its_past(monkeypatch):
    monkeypatch.setattr(module, "_first", True)
    first, second = Stopwatch.of_engine("past").read(), Stopwatch.of_engine("past").read()
    assert [name for name, _ in first.parts] == ["past"]
    assert first.began == pytest.approx(process_start(), abs=1.0)
    assert "past" not in dict(second.parts)
    assert second.began > first.began


def test_the_process_start_is_the_operating_systems():
    code = "import time; from quire.engine.timeline import process_start; print(process_start(), time.monotonic())"
    before = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ).stdout
    started, asked = map(float, out.split())
    assert before - 0.02 <= started < asked


@pytest.mark.parametrize("line", ["", "1 (sh", "1 (a) b) S 1"])
def test_a_system_that_does_not_say_when_a_process_began_is_borne(line, tmp_path, monkeypatch):
    (tmp_path / "stat").write_text(line)
    monkeypatch.setattr(module, "STAT", tmp_path / "stat")
    assert process_start() == module._imported


def test_an_engine_knows_where_its_start_went(shared_llm):
    timeline = shared_llm.llm_engine.timeline
    assert total(timeline) == pytest.approx(timeline.total, rel=0.02)
    assert {"configuration", "load weights", "profile", "allocate cache"} <= set(dict(timeline.parts))


def test_a_server_tells_where_its_start_went(caplog):
    timeline = Timeline([("load", 2.0)], 2.0, 3.0)
    with caplog.at_level(logging.DEBUG, logger="quire.serve.api_workers.launch"):  # others may have set its level
        launch.log_ready("m", "http://x", time.monotonic() - 9.0, "http://x/", timeline)
    assert re.search(r"ready: serving m on http://x after 9\.\d s", caplog.text)
    assert "open the API" in caplog.text
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert line.endswith("open http://x/ in a browser to try it")


def test_engines_are_forked_from_the_first_start_on_and_end_by_themselves(tiny_model, traces):
    args = EngineArgs(str(tiny_model), device="cpu", max_model_len=64, data_parallel_size=2, warm_restart=True)
    llm = AsyncLLM.from_engine_args(args)
    engines, parents, timelines, processes = llm.engines, [], [], []

    def note():
        for engine in engines:
            parents.append(int(Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[1]))
        timelines.append(llm.timeline)

    async def scene():
        await llm.wait_ready()
        note()
        os.kill(lost := engines[0].pid, signal.SIGKILL)  # as soon as it is ready
        while engines[0].pid in (lost, None) or engines[0].state != "ready":
            await asyncio.sleep(0.01)
        note()
        assert Path(f"/proc/{parents[0]}/comm").read_text() == "quire-fork-serv\n"  # 15 characters at most
        processes.extend(engine.supervisor._child._process for engine in engines)

    run(scene(), llm)
    assert len({*parents}) == 1 and parents[0] != os.getpid()
    assert [process.returncode for process in processes] == [0, 0]
    for timeline in timelines:
        assert total(timeline) == pytest.approx(timeline.total, rel=0.02)


def test_the_process_tells_what_it_is_at(tiny_model, traces, caplog, capsys):
    hurried = (
        "import quire.progress, runpy; quire.progress.LINE_INTERVAL_S = 0.001; "
        "runpy.run_module('quire.engine.process', run_name='__main__')"
    )
    config = resolve(EngineArgs(str(tiny_model), device="cpu", max_model_len=64), lambda: "cpu", describe)
    with caplog.at_level(logging.INFO, "quire"):
        llm = AsyncLLM(config, (sys.executable, "-c", hurried))
        run(llm.wait_ready(), llm)
    told = capsys.readouterr().err
    for work in ("importing torch", "loading weights"):
        assert re.search(rf"^\(engine \d+\) [-\d]+ [:.\d]+ INFO \[quire\.engine\.process\] {work}.* \(\d+ s\)$", told, re.M), (
            told
        )
