"""Engines that share experts: the tokens of one process, whoever of them has work, and after the loss of any of their ranks."""

import logging
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny import shared_files

from patience import PATIENCE, wait_for
from quire import LLM, SamplingParams
from quire.features.experts.peers import POLL_S, ExpertPeers, watch_peers
from quire.proc.spawn import processor_time
from quire.types.errors import ConfigError
from serving import NAME, Running

pytestmark = pytest.mark.usefixtures("quick")
SMALL = {
    "skip_tokenizer_init": True, "device": "cpu", "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 40,
}  # fmt: skip
BOTH = {"data_parallel_size": 2, "enable_expert_parallel": True}
RANDOM = random.Random(5)
SHARED = [RANDOM.randrange(3, 199) for _ in range(20)]
PROMPTS = [[RANDOM.randrange(3, 199) for _ in range(count)] for count in (70, 1, 18, 2, 33)] + [
    [*SHARED, i] for i in range(3, 7)
]


def params(**more):
    return SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | more))


SOME = [
    params(max_tokens=40), params(temperature=0.9, seed=7, top_k=50), params(n=3, temperature=0.8, seed=3),
    params(max_tokens=1), params(logprobs=2, prompt_logprobs=1),
]  # fmt: skip
WORK = PROMPTS, [SOME[i % len(SOME)] for i in range(len(PROMPTS))]


def ids(outputs):
    assert not any(choice.error for output in outputs for choice in output.outputs)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


def chances(outputs):
    return [
        {token: chance.logprob for token, chance in (position or {}).items()}
        for output in outputs
        for position in (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ()))
    ]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What one process says, by family."""
    found = {}

    def get(name):
        if name not in found:
            llm = LLM(str(checkpoint(name).directory), **SMALL)
            found[name] = llm.generate(*WORK, use_tqdm=False)
            llm.llm_engine.shutdown()
        return found[name]

    return get


@pytest.fixture(scope="module")
def two(checkpoint, quick):
    """Their experts move all the time."""
    logger = logging.getLogger("quire")
    level, _ = logger.level, logger.setLevel(logging.INFO)
    moving = {"window_size": 4, "step_interval": 5, "log_balancedness": True, "num_redundant_experts": 3}
    llm = LLM(str(checkpoint("mixtral").directory), **SMALL, **BOTH, enable_eplb=True, eplb_config=moving)
    logger.setLevel(level)
    yield llm
    llm.llm_engine.shutdown()


def working(engines, seconds):
    """Return the processor time of each engine over so many seconds."""
    used = [processor_time(engine.pid) for engine in engines]
    time.sleep(seconds)
    return [processor_time(engine.pid) - was for engine, was in zip(engines, used, strict=True)]


def test_the_tokens_of_one_process(two, expected, capsys):
    for _ in range(2):
        outputs = two.generate(*WORK, use_tqdm=False)
        assert ids(outputs) == ids(expected("mixtral"))
    told = re.findall(r"experts: balance ([\d.]+), now ([\d.]+)", capsys.readouterr().err)
    assert any(float(now) > float(before) for before, now in told), "some have moved"
    ours, theirs = chances(outputs), chances(expected("mixtral"))
    assert theirs and ours == [pytest.approx(position, abs=1e-4) for position in theirs]
    assert any(output.num_cached_tokens for output in outputs), "some have pages of the first time"
    stats = [engine.stats for engine in two.llm_engine.core.engines]
    assert all(each.queries for each in stats) and sum(each.preemptions for each in stats), "both have worked, and had too much"


def test_one_works_and_the_other_has_nothing_to_do_and_then_both(two, expected):
    engines = two.llm_engine.core.engines
    before = [engine.stats.queries for engine in engines]
    assert ids(two.generate(PROMPTS[:1], SOME[0], use_tqdm=False)) == ids(expected("mixtral")[:1])
    assert sum(engine.stats.queries > was for engine, was in zip(engines, before, strict=True)) == 1
    wait_for(lambda: all(work < 0.1 for work in working(engines, 0.5)))  # seconds of processor time: engines without work sleep


def test_two_engines_of_two_ranks_and_the_loss_of_one(checkpoint, expected):
    llm = LLM(str(checkpoint("qwen3-moe").directory), **SMALL, **BOTH, tensor_parallel_size=2)
    engines = llm.llm_engine.core.engines
    try:
        lost = [engine.pid for engine in engines]
        open_files = len([*Path("/proc/self/fd").iterdir()])
        killing = threading.Timer(0.2, os.kill, (lost[1], signal.SIGKILL))
        killing.start()
        assert ids(llm.generate(*WORK, use_tqdm=False)) == ids(expected("qwen3-moe"))
        killing.join()
        wait_for(lambda: [engine.state for engine in engines] == ["ready"] * 2 and engines[0].restarts)
        assert [engine.restarts for engine in engines] == [1, 1]
        assert "which has some of its experts, is gone" in engines[0].last_loss and "SIGKILL" in engines[1].last_loss
        assert ids(llm.generate(*WORK, use_tqdm=False)) == ids(expected("qwen3-moe"))
        assert len([*Path("/proc/self/fd").iterdir()]) <= open_files
        lost += [engine.pid for engine in engines]
    finally:
        llm.llm_engine.shutdown()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in lost))
    assert not [path for path in shared_files() if "quire" in path.name]


def test_one_that_starts_sees_that_another_is_gone():
    companions, lost = ExpertPeers(2, 2), threading.Event()
    mine, theirs = companions.take(0), companions.take(1)
    with watch_peers(mine, lost.set):
        mine.close([1])  # its other rank has them
        assert not lost.wait(2 * POLL_S)
        theirs.close()
        assert lost.wait(PATIENCE)
    mine.close([0])
    os.close(mine.memory)


def test_served_and_stopped(checkpoint, expected):
    running = Running(checkpoint("mixtral").directory, quick=False, **SMALL, **BOTH)  # forked nevertheless, and again
    try:
        engines = running.llm.engines

        def ask(number, engine):
            body = {
                "model": NAME, "prompt": PROMPTS[number], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            answer = running.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(engine)})
            return answer.json()["choices"][0]["token_ids"]

        few = expected("mixtral")[0].outputs[0].token_ids[:12]
        assert ask(0, 0) == ask(0, 1) == list(few)
        os.kill(engines[0].pid, signal.SIGSTOP)
        assert ask(0, 1) == list(few), "it has waited for the other one's experts"
        assert "SIGSTOP" in engines[0].last_loss and engines[1].restarts == 1
    finally:
        running.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tensor_parallel_size": 3}, r"5 experts cannot be divided among 6 ranks \(2 engines\)"),
        ({"pipeline_parallel_size": 2}, "share the experts then, which is not supported with pipeline_parallel_size=2 yet"),
        ({"enable_lora": True}, "is not supported with enable_lora yet"),
        ({"data_parallel_size_local": 1}, r"engines on other machines \(data_parallel_size_local\)"),
    ],
)
def test_what_cannot_be_had(checkpoint, more, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint("mixtral").directory), **SMALL, **BOTH, **more)
