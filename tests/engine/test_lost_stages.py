"""A stage of a pipeline that dies or is stopped is named, and the engine goes on with others."""

import json
import os
import signal

import pytest
from test_lost_ranks import lives, ranks_of
from tiny import TEXT, open_model

from quire import SamplingParams
from quire.engine.executor import workers
from quire.sampling_params import StructuredOutputsParams
from quire.types.errors import EngineDead
from serving import NAME, Running

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_a_stopped_stage_is_named_and_ends_with_the_engine(tiny_model, monkeypatch):
    monkeypatch.setattr(workers, "STOPPED_TIMEOUT_S", 0.1)
    llm = open_model(tiny_model, pipeline_parallel_size=2)
    [pid] = ranks_of(os.getpid())
    llm.generate(TEXT, GREEDY, use_tqdm=False)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2):  # and again: it does not go on
        with pytest.raises(EngineDead, match=rf"rank 1 \(stage 1, process {pid}\) is stopped \(SIGSTOP\) and delayed"):
            llm.generate(TEXT, GREEDY, use_tqdm=False)
    llm.llm_engine.shutdown()
    assert not lives(pid)


@pytest.fixture
def served(tiny_model, quick):
    drafts = {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "adaptive": False}
    running = Running(tiny_model, pipeline_parallel_size=2, speculative_config=drafts)
    yield running
    running.close()


def test_streams_outlive_a_killed_stage(served, shared_llm):
    body = {"model": NAME, "prompt": TEXT[:3], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    alone = [output.outputs[0].text for output in shared_llm.generate(TEXT[:3], params, use_tqdm=False)]
    rules = {"regex": "(fox|dog) [a-z]{3,9}"}
    more = {"temperature": 0.8, "seed": 3, "n": 2, "max_tokens": 20, "logprobs": 2}
    [expected] = shared_llm.generate(
        TEXT[0], SamplingParams(**more, structured_outputs=StructuredOutputsParams(**rules)), use_tqdm=False
    )
    answer = served.http.post(
        "/v1/completions", json={"model": NAME, "prompt": TEXT[0], "structured_outputs": rules, **more}
    ).json()
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected.outputs]
    [_, rank] = (described["pid"] for described in served.call(served.llm.collective_rpc("describe_rank")))
    texts, killed = ["", "", ""], None
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
            if min(map(len, texts)) > 20 and killed is None:
                os.kill(rank, signal.SIGKILL)
                killed = rank
    assert texts == alone
    assert 0 < served.llm.stats.drafts.accepted < served.llm.stats.drafts.tokens
    assert served.llm.last_loss == f"rank 1 (stage 1, process {killed}) ended with signal SIGKILL"
