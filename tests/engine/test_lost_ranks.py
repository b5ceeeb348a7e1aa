"""Ranks that die, hang or cannot start: they are named, the engine goes on with others, and no process is left."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tiny import TEXT, open_model

from patience import PATIENCE
from quire import SamplingParams
from quire.engine import agreement
from quire.engine.executor import workers
from quire.types.errors import ConfigError, EngineDead, EngineError
from serving import NAME, Running

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def ranks_of(pid: int) -> list[int]:
    """The worker processes of an engine."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "quire.engine.executor.worker" in Path(f"/proc/{child}/cmdline").read_text():
            found.append(int(child))
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_the_end(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(map(lives, pids)):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.02)


def test_a_stopped_rank_is_named_and_ends_with_the_engine(tiny_model, monkeypatch):
    monkeypatch.setattr(workers, "STOPPED_TIMEOUT_S", 0.1)
    llm = open_model(tiny_model, tensor_parallel_size=2)
    [pid] = ranks_of(os.getpid())
    llm.generate(TEXT, GREEDY, use_tqdm=False)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2):  # and again: it does not go on
        with pytest.raises(EngineDead, match=rf"rank 1 \(process {pid}\) is stopped \(SIGSTOP\) and delayed the other ranks"):
            llm.generate(TEXT, GREEDY, use_tqdm=False)
    llm.llm_engine.shutdown()
    assert not lives(pid)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(7)", r"rank 1 \(process \d+\) ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", r"rank 1 \(process \d+\) ended with signal SIGKILL"),
    ],
)
def test_a_rank_that_cannot_start_is_named(tiny_model, monkeypatch, code, message):
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-S", "-c", code))
    with pytest.raises(EngineError, match=message):
        open_model(tiny_model, tensor_parallel_size=2)
    assert ranks_of(os.getpid()) == []


def test_a_rank_that_never_starts_is_named(tiny_model, monkeypatch):
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-S", "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(workers, "POLL_S", 0.05)
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) did not start in time. .* raise engine_start_timeout"):
        open_model(tiny_model, tensor_parallel_size=2, engine_start_timeout=0.1)
    assert ranks_of(os.getpid()) == []


def test_a_rank_that_resolves_another_configuration_is_named(tiny_model, monkeypatch):
    """Ranks read their own environment: one divides the layers differently."""
    values = agreement.resolved_values
    monkeypatch.setattr(agreement, "resolved_values", lambda config: values(config) | {"layers of each stage": "1, 3"})
    with pytest.raises(ConfigError, match=r"rank 1 \(.*process \d+\): its layers of each stage is '2', rank 0's is '1, 3'"):
        open_model(tiny_model, tensor_parallel_size=2)


@pytest.fixture
def served(tiny_model):
    running = Running(tiny_model, quick=False, tensor_parallel_size=2)
    yield running
    running.close()


def test_a_stream_outlives_a_killed_rank_and_no_rank_outlives_its_engine(served, shared_llm):
    body = {"model": NAME, "prompt": TEXT[0], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    [alone] = shared_llm.generate(TEXT[0], params, use_tqdm=False)
    engine, text, killed = served.llm.engine_pid, "", None
    [rank] = ranks_of(engine)
    with served.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if len(text) > 20 and killed is None:
                os.kill(rank, signal.SIGKILL)
                killed = rank
    assert text == alone.outputs[0].text
    assert served.llm.last_loss == f"rank 1 (process {killed}) ended with signal SIGKILL"
    assert not lives(engine)
    engine = served.llm.engine_pid
    [rank] = ranks_of(engine)
    os.kill(engine, signal.SIGKILL)
    wait_for_the_end([engine, rank])
