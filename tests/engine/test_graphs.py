"""On a GPU: replayed graphs a step ahead give the tokens of one launch after the other, whatever comes and goes."""

import random

import pytest
import torch
from tiny import make_model, open_model

from quire import SamplingParams
from quire.attn import work_split
from quire.attn.backend import Room
from quire.attn.work_split import NOTHING_SHARED
from quire.runner.buckets import Bucket
from quire.runner.graphs import StepRecorder
from quire.runner.slots import Prefixes

pytestmark = pytest.mark.gpu

REQUESTS = 48
EXTRAS = [
    {}, {}, {}, {}, {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2, "logprobs": 0},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"logit_bias": {5: 2.0}, "min_tokens": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def workload(seed: int, special: bool = True) -> list[tuple[int, list[int], SamplingParams, int | None]]:
    """(turn of arrival, prompt, parameters, turns until it is aborted) of each request; special ones want more than a draw."""
    rng = random.Random(seed)
    out = []
    for index in range(REQUESTS):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8, 1.2]), seed=index, max_tokens=rng.randint(1, 90), ignore_eos=True,
            top_k=rng.choice([0, 0, 7, 100]), top_p=rng.choice([1.0, 1.0, 0.8]), min_p=rng.choice([0.0, 0.0, 0.05]),
            **rng.choice(EXTRAS if special else [{}]),
        )  # fmt: skip
        prompt = [rng.randrange(2, 320) for _ in range(rng.choice([1, 2, 7, 30, 100]))]
        out.append((rng.randint(0, 120), prompt, params, rng.choice([None, None, None, rng.randint(1, 40)])))
    return out


def play(llm, requests) -> dict[str, list[int]]:
    """The tokens of every request that was not aborted."""
    engine, tokens, turn = llm.llm_engine, {}, 0
    aborted = {str(i) for i, (*_, after) in enumerate(requests) if after is not None}
    while turn <= 160 or engine.has_unfinished_requests():
        for index, (arrival, prompt, params, after) in enumerate(requests):
            if arrival == turn:
                engine.add_request(str(index), prompt, params)
            if after is not None and arrival + after == turn:
                engine.abort_request([str(index)])
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        turn += 1
    return {name: found for name, found in tokens.items() if name not in aborted}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("args", [{}, {"max_num_batched_tokens": 17}], ids=["roomy", "tight"])
def test_as_one_launch_after_the_other(directory, seed, args):
    args = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256, **args}
    requests = workload(seed)
    plain = open_model(directory, **args, enforce_eager=True, async_scheduling=False)
    expected = play(plain, requests)
    recorded = open_model(directory, **args, async_scheduling=True)
    assert play(recorded, requests) == expected
    assert len(expected) > REQUESTS // 2
    assert plain.llm_engine.core.executor._runner.graphs is None
    graphs = recorded.llm_engine.core.executor._runner.graphs
    assert graphs.captures >= 2  # others borrow
    assert graphs.replays > 40  # the tight engine has few steps in which no prompt is run


def test_idle_time_is_enough(directory):
    """Once the usual buckets are there, traffic records nothing and runs nothing eagerly."""
    args = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    requests = workload(11, special=False)
    expected = play(open_model(directory, **args, enforce_eager=True, async_scheduling=False), requests)
    llm = open_model(directory, **args)
    core = llm.llm_engine.core
    while core.idle():
        pass
    graphs = core.executor._runner.graphs
    before = graphs.captures
    assert before >= 5
    assert play(llm, requests) == expected
    assert (graphs.captures, graphs.eager) == (before, 0)
    assert graphs.replays > 40


def test_larger_graphs_are_borrowed(directory, monkeypatch):
    args = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    requests = workload(12)
    expected = play(open_model(directory, **args, enforce_eager=True, async_scheduling=False), requests)
    monkeypatch.setattr("quire.runner.graphs.EAGER_STEPS", 10**9)
    monkeypatch.setattr(
        "quire.runner.graphs.idle_buckets",
        lambda *_: [Bucket(2, Room(64, 0)), Bucket(8, Room(128, 0)), Bucket(16, Room(64, 0))],
    )
    llm = open_model(directory, **args)
    core = llm.llm_engine.core
    while core.idle():
        pass
    assert play(llm, requests) == expected
    graphs = core.executor._runner.graphs
    assert graphs.captures == 3 and graphs.replays > 40


def test_a_recording_that_fails_costs_no_answer(directory, monkeypatch):
    args = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    requests = workload(7)
    expected = play(open_model(directory, **args, enforce_eager=True), requests)
    forward = StepRecorder._forward

    def fails_when_recorded(*given):
        logits = forward(*given)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("no memory")
        return logits

    monkeypatch.setattr(StepRecorder, "_forward", fails_when_recorded)
    llm = open_model(directory, **args)
    assert play(llm, requests) == expected
    graphs = llm.llm_engine.core.executor._runner.graphs
    assert (graphs.captures, graphs.replays) == (0, 0)


@pytest.mark.parametrize("eager", [False, True])
def test_prompts_that_begin_alike(directory, monkeypatch, eager):
    """Two prefixes, one of them going on for some requests, and requests of their own: tokens as if each read for itself."""
    monkeypatch.setattr(work_split, "SPLIT", 32)
    rng = random.Random(5)
    heads = [[rng.randrange(2, 320) for _ in range(length)] for length in (70, 100)]
    heads.append(heads[0] + [rng.randrange(2, 320) for _ in range(40)])
    requests = []
    for index in range(36):
        head = heads[index % 3] if index % 6 else []
        prompt = head + [rng.randrange(2, 320) for _ in range(rng.choice([1, 3, 20]))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(5, 60), ignore_eos=True)
        requests.append((rng.randint(0, 30), prompt, params, None))
    args = {"device": "cuda", "dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 256}
    with monkeypatch.context() as patch:
        patch.setattr(Prefixes, "_find", lambda *given: NOTHING_SHARED)
        expected = play(open_model(directory, **args, enforce_eager=True), requests)
    found = []
    find = Prefixes._find

    def watched(*given):
        found.append(find(*given))
        return found[-1]

    monkeypatch.setattr(Prefixes, "_find", watched)
    llm = open_model(directory, **args, enforce_eager=eager)
    assert play(llm, requests) == expected
    assert sum(len(alike.order) > 0 for alike in found) > 20
    if not eager:
        graphs = llm.llm_engine.core.executor._runner.graphs
        assert any(bucket.room.shared for bucket in graphs._recorded)
