"""Data parallelism offline: `LLM(data_parallel_size=2)` is one engine to whoever uses it, also when half of it is killed."""

import asyncio
import gc
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from async_support import processes
from tiny import TEXT, open_model

from patience import PATIENCE, wait_for
from quick_engines import held_back
from quire import LLM, SamplingParams
from quire.engine import replicas
from quire.types.errors import ConfigError, EngineDead, InvalidParameter, PromptTooLong
from quire.types.sampling import BeamSearchParams
from quire.types.structured import StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def two(tiny_model, quick):
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}  # which change nothing
    llm = open_model(tiny_model, data_parallel_size=2, disable_log_stats=False, speculative_config=drafts)
    yield llm
    llm.llm_engine.shutdown()


def params(**more):
    return SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | more))


def work():
    """Greedy, seeded, unseeded, several choices, log probabilities, a grammar, stop strings, a beginning that some share."""
    some = [
        params(),
        params(temperature=1.0, seed=7),
        params(temperature=0.8, n=3, seed=11, top_k=20),
        params(logprobs=2, prompt_logprobs=1),
        params(structured_outputs=StructuredOutputsParams(regex="[a-f]{4,9}"), ignore_eos=False),
        params(stop=["e", "a"], presence_penalty=0.5),
    ]
    prompts = [f"{TEXT[i % 3]} {'shared words ' * (i % 4)}{i}" for i in range(18)]
    return prompts, [some[i % len(some)] for i in range(18)]


def told(outputs):
    return [
        (o.prompt, [(c.index, c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for c in o.outputs]) for o in outputs
    ]


def test_the_same_answers_in_the_same_order(shared_llm, two):
    prompts, some = work()
    alone, both = (llm.generate(prompts, some, use_tqdm=False) for llm in (shared_llm, two))
    assert told(both) == told(alone)
    for one, other in zip(alone, both, strict=True):
        chances = [
            [
                {token: chance.logprob for token, chance in (position or {}).items()}
                for position in (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ()))
            ]
            for output in (one, other)
        ]
        assert chances[0] == [pytest.approx(position, abs=1e-4) for position in chances[1]]
    unseeded = params(temperature=1.0)
    again = [open_seed(llm).generate(prompts, unseeded, use_tqdm=False) for llm in (shared_llm, two)]
    assert told(again[0]) == told(again[1])
    engines = two.llm_engine.core.engines
    assert all(engine.stats.queries > 0 and engine.state == "ready" for engine in engines), "both have worked"
    assert not two.llm_engine.has_unfinished_requests() and two.get_world_size() == 2 and two.get_world_size(False) == 1


def test_every_engine_has_a_draft_model(shared_llm, tiny_model):
    prompts, some = (part[:12] for part in work())
    drafts = {"model": str(tiny_model), "num_speculative_tokens": 3, "adaptive": False}  # whatever is worth it here
    llm = open_model(tiny_model, data_parallel_size=2, speculative_config=drafts)
    assert told(llm.generate(prompts, some, use_tqdm=False)) == told(shared_llm.generate(prompts, some, use_tqdm=False))
    counts = [engine.stats.drafts for engine in llm.llm_engine.core.engines]
    llm.llm_engine.shutdown()
    assert all(0 < count.accepted <= count.tokens for count in counts)


def open_seed(llm):
    """As if nobody had asked before: seeds of those who bring none count from the start."""
    from itertools import count

    llm.llm_engine.inputs._unseeded = count()
    return llm


def test_beams_stay_with_their_pages(shared_llm, two):
    search = BeamSearchParams(beam_width=3, max_tokens=5)
    found = [llm.beam_search(list(TEXT), search) for llm in (shared_llm, two)]
    assert [[s.tokens for s in o.sequences] for o in found[0]] == [[s.tokens for s in o.sequences] for o in found[1]]
    assert not two.llm_engine.core._router._balancer._held


def test_what_is_wrong_is_said_before_anything_runs(two):
    with pytest.raises(PromptTooLong, match="256"):
        two.generate({"prompt_token_ids": [5] * 300}, params(), use_tqdm=False)
    with pytest.raises(InvalidParameter, match="regex"):
        two.generate(TEXT[0], params(structured_outputs=StructuredOutputsParams(regex="(")), use_tqdm=False)
    assert not two.llm_engine.has_unfinished_requests()
    assert two.generate(TEXT[0], params(), use_tqdm=False)[0].outputs[0].token_ids


def test_the_cache_is_forgotten_everywhere_and_metrics_are_told_by_engine(two):
    prompts = [f"{TEXT[0]} {TEXT[1]} {i}" for i in range(4)]
    two.generate(prompts, params(max_tokens=1), use_tqdm=False)
    assert any(o.num_cached_tokens for o in two.generate(prompts, params(max_tokens=1), use_tqdm=False))
    assert two.reset_prefix_cache() is True
    assert not any(o.num_cached_tokens for o in two.generate([TEXT[0]], params(max_tokens=1), use_tqdm=False))
    told = [metric for metric in two.get_metrics() if metric.name == "vllm:prompt_tokens"]
    assert {metric.labels["engine"] for metric in told} == {"0", "1"} and all(metric.value > 0 for metric in told)
    drafted = [metric for metric in two.get_metrics() if metric.name == "vllm:spec_decode_num_draft_tokens"]
    assert {metric.labels["engine"] for metric in drafted} == {"0", "1"} and sum(metric.value for metric in drafted) > 0


def test_a_prefix_that_one_engine_has_cached_does_not_make_the_others_queue_there(tiny_model, traces):
    two = fake(tiny_model, max_num_seqs=2)
    shared = list(range(3, 163))
    engines = two.llm_engine.core.engines

    def counts():
        return [0 if engine.stats is None else engine.stats.queries for engine in engines]

    def queries(prompts, **more):
        before = counts()
        two.generate([{"prompt_token_ids": prompt} for prompt in prompts], params(**more), use_tqdm=False)
        return [after - count for after, count in zip(counts(), before, strict=True)]

    home = queries([shared], max_tokens=1)
    assert sorted(home) == [0, len(shared)]
    assert queries([[*shared, 7]], max_tokens=20) == [len(shared) + 1 if count else 0 for count in home], "affinity, when idle"
    assert queries([[*shared, i] for i in range(4)], max_tokens=20) == [2 * (len(shared) + 1)] * 2, "two slots each"
    two.llm_engine.shutdown()


def test_requests_that_a_lost_engine_had_not_begun_move_to_free_slots(tiny_model, traces, monkeypatch):
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.01")
    prompts = [f"{TEXT[i % 3]} {i}" for i in range(6)]
    asked = [params(max_tokens=60)] * 2 + [params(max_tokens=3)] * 4
    alone = told(fake(tiny_model, data_parallel_size=1).generate(prompts, asked, use_tqdm=False))
    two = fake(tiny_model, max_num_seqs=1)
    core, ended = two.llm_engine.core, []
    engine = core.engines[1]

    def lose():
        wait_for(lambda: engine.stats is not None and engine.stats.running and engine.stats.waiting)
        with held_back(engine.supervisor):
            os.kill(engine.pid, signal.SIGKILL)
            wait_for(lambda: not core.engines[0].num_open and engine.num_open <= 1)
            ended.append(engine.num_open)

    killer = threading.Thread(target=lose)
    killer.start()
    assert told(two.generate(prompts, asked, use_tqdm=False)) == alone
    killer.join(PATIENCE)
    assert ended == [1], "only the one that had begun waited for the restart"
    two.llm_engine.shutdown()


def test_a_killed_engine_is_only_a_pause(tiny_model, monkeypatch, traces):
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.003")
    prompts = [f"{TEXT[i % 3]} {i}" for i in range(16)]
    long = [params(max_tokens=150), params(max_tokens=100, temperature=1.0, seed=5, n=2)] * 8
    undisturbed = told(fake(tiny_model, data_parallel_size=1).generate(prompts, long, use_tqdm=False))
    two = fake(tiny_model)
    core = two.llm_engine.core
    seen = []

    def kill():
        while not seen:
            stats = core.engines[1].stats
            if stats is not None and stats.running:
                seen.append(core.engines[1].pid)
                os.kill(seen[0], signal.SIGKILL)
            time.sleep(0.001)

    killer = threading.Thread(target=kill)
    killer.start()
    disturbed = told(two.generate(prompts, long, use_tqdm=False))
    killer.join(PATIENCE)
    assert disturbed == undisturbed and [engine.restarts for engine in core.engines] == [0, 1]
    assert core.engines[1].pid != seen[0] and core.replayed > 0
    two.llm_engine.shutdown()


def fake(model, **more):
    return open_model(model, **({"distributed_executor_backend": "fake", "data_parallel_size": 2} | more))


def test_nothing_is_left_behind_when_it_is_forgotten(tiny_model, traces):
    llm = fake(tiny_model)
    assert len(processes(traces.room)) == 2
    assert llm.generate(TEXT[0], params(), use_tqdm=False)[0].finished
    del llm
    gc.collect()


def test_whoever_listens_to_engines_has_ended_with_them():
    """No task is left for the interpreter to destroy, whatever it waits for."""
    tasks, loop, ended = [], asyncio.new_event_loop(), threading.Event()

    async def wait():
        tasks.append(asyncio.current_task())
        await asyncio.gather(*(asyncio.sleep(1000) for _ in range(2)))

    async def listen():
        tasks.append(asyncio.current_task())
        await asyncio.gather(wait(), wait())

    thread = threading.Thread(target=replicas._run, args=(loop, ended))
    thread.start()
    asyncio.run_coroutine_threadsafe(listen(), loop)
    while len(tasks) < 3:
        time.sleep(0.001)
    replicas._end(loop, SimpleNamespace(stop=lambda _: None), ended)
    assert ended.is_set() and loop.is_closed() and [task.cancelled() for task in tasks] == [True] * 3
    thread.join()


def test_an_engine_that_cannot_start_is_named(tiny_model, traces):
    with pytest.raises(ConfigError, match=r"engine [01]: max_model_len 64 needs 16 cache pages"):
        fake(tiny_model, num_gpu_blocks_override=2, max_model_len=64)


def test_engines_that_are_given_up_are_told(tiny_model, traces, monkeypatch):
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.005")
    llm = fake(tiny_model, max_engine_restarts=0)
    core = llm.llm_engine.core
    first, second = (engine.pid for engine in core.engines)
    prompts = [f"{TEXT[0]} {i}" for i in range(8)]
    some = [params(max_tokens=100, n=1 + i % 2, seed=i, temperature=1.0) for i in range(8)]
    alone = told(fake(tiny_model, data_parallel_size=1).generate(prompts, some, use_tqdm=False))

    def lose():
        while not all(engine.stats is not None and engine.stats.running for engine in core.engines):
            time.sleep(0.001)
        os.kill(first, signal.SIGKILL)

    threading.Thread(target=lose, daemon=True).start()
    assert told(llm.generate(prompts, some, use_tqdm=False)) == alone, "what it had begun goes on in the other"
    while core.engines[0].state != "dead":
        time.sleep(0.01)
    assert core.replayed > 0
    assert all(output.finished for output in llm.generate(list(TEXT), params(), use_tqdm=False)), "the other goes on"
    assert core.engines[1].pid == second
    os.kill(second, signal.SIGKILL)
    while core.engines[1].state != "dead":
        time.sleep(0.01)
    with pytest.raises(EngineDead, match="SIGKILL"):
        llm.generate(TEXT[0], params(), use_tqdm=False)
    llm.llm_engine.shutdown()


def test_arguments():
    for name, value, instead in (
        ("data_parallel_size", 0, "at least 1"),
        ("data_parallel_size", 100, "at most 64"),
        ("data_parallel_size_local", 65, "at most 64"),
        ("data_parallel_rpc_port", 0, "at least 1"),
        ("data_parallel_rank", 1, "X-data-parallel-rank"),
    ):
        with pytest.raises(ConfigError, match=instead):
            LLM("nowhere", **{name: value})
