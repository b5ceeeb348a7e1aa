"""Stages of a pipeline on GPUs, which share one card: they give the tokens of one process, and outlive each other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import TEXT, open_model
from transformers import LlamaForCausalLM

from adapters import IDS, KINDS, merge
from quire import SamplingParams
from quire.lora.request import LoRARequest
from quire.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.gpu

HANDOVER, LOSS = (Path(__file__).with_name(name) for name in ("cuda_handover.py", "cuda_loss.py"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=24, ignore_eos=True)
EDITED = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=12, ignore_eos=True, logprobs=2)
SETTINGS = {"device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "block_size": 16}
LONG = [text * 12 for text in TEXT[:3]]  # more than a step takes


@pytest.fixture(scope="module", autouse=True)
def _sharing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CUDA_RANKS", "1")
        yield


@pytest.fixture(scope="module")
def loras(tiny_model, tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("adapters"), {"none": None}
    for number, name in enumerate(KINDS, 1):
        model = LlamaForCausalLM.from_pretrained(tiny_model)
        found[name] = LoRARequest(name, number, merge(model, folder / name, *KINDS[name]))
    return found


def texts(llm, prompts, params, **more):
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    assert not any(choice.error for output in outputs for choice in output.outputs)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


def everything(llm, loras):
    """What is asked of one process, and of stages."""
    rules = SamplingParams(
        temperature=0.8, seed=3, n=2, max_tokens=16, structured_outputs=StructuredOutputsParams(regex="(fox|dog) [a-z]{3}")
    )
    order = [*loras] * 3
    return {
        "greedy": [texts(llm, TEXT, GREEDY) for _ in range(3)],  # graphs are recorded meanwhile
        "seeded": texts(llm, TEXT, SEEDED),
        "long": texts(llm, LONG, GREEDY),
        "prefix": texts(llm, [text + " and more" for text in LONG], SEEDED),
        "edited": texts(llm, TEXT, EDITED),
        "grammar": texts(llm, TEXT[:2], rules),
        "adapters": texts(llm, [{"prompt_token_ids": IDS}] * len(order), GREEDY, lora_request=[loras[name] for name in order]),
    }


@pytest.fixture(scope="module")
def expected(tiny_model, loras):
    llm = open_model(tiny_model, enable_lora=True, max_loras=2, **SETTINGS)
    found = everything(llm, loras)
    llm.llm_engine.shutdown()
    return found


@pytest.mark.parametrize("way", ["card", "host"])
def test_what_is_handed_on_comes(way):
    command = [sys.executable, str(HANDOVER), *([] if way == "card" else [way])]
    ran = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "what was sent came" in ran.stdout


def test_two_stages(tiny_model, expected, loras):
    llm = open_model(tiny_model, enable_lora=True, max_loras=2, pipeline_parallel_size=2, **SETTINGS)
    try:
        found = everything(llm, loras)
        assert {name: found[name] == told for name, told in expected.items()} == dict.fromkeys(expected, True)
        assert llm.llm_engine.core.stats.device.replays > 50
        assert [rank["stage"] for rank in llm.collective_rpc("describe_rank")] == [0, 1]
        llm.llm_engine.core.scheduler.roster.check()
    finally:
        llm.llm_engine.shutdown()


def test_two_stages_of_two_ranks(tiny_model, expected):
    llm = open_model(tiny_model, tensor_parallel_size=2, pipeline_parallel_size=2, **SETTINGS)
    try:
        assert [texts(llm, TEXT, GREEDY) for _ in range(3)] == expected["greedy"]
        assert texts(llm, TEXT, SEEDED) == expected["seeded"]
        assert texts(llm, LONG, GREEDY) == expected["long"]
    finally:
        llm.llm_engine.shutdown()


def test_drafts_and_preemption(tiny_model, expected):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    llm = open_model(
        tiny_model, pipeline_parallel_size=2, speculative_config=drafts, num_gpu_blocks_override=8, max_model_len=96,
        **SETTINGS,
    )  # fmt: skip
    try:
        assert [texts(llm, TEXT, GREEDY) for _ in range(3)] == expected["greedy"]
        assert texts(llm, TEXT * 3, GREEDY) == expected["greedy"][0] * 3
        assert texts(llm, TEXT, SEEDED) == expected["seeded"]
        assert llm.llm_engine.core.stats.preemptions > 0 and llm.llm_engine.core.stats.drafts.accepted > 0
    finally:
        llm.llm_engine.shutdown()


def test_streams_outlive_a_killed_stage(tiny_model, expected):
    """With `LLM` it is an error, at once: `test_a_killed_stage_is_told`."""
    pytest.importorskip("httpx")
    from test_lost_ranks import ranks_of

    from serving import NAME, Running

    running = Running(tiny_model, quick=False, pipeline_parallel_size=2, **SETTINGS)
    try:
        body = {"model": NAME, "prompt": TEXT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        told = running.http.post("/v1/completions", json=body | {"max_tokens": 24}).json()
        assert [[choice["token_ids"]] for choice in told["choices"]] == expected["greedy"][0]
        alone = running.http.post("/v1/completions", json=body | {"max_tokens": 180}).json()["choices"]
        [rank] = ranks_of(running.llm.engine_pid)
        came, killed, waited = [""] * len(TEXT), 0.0, 0.0  # `waited`: seconds until the next token
        with running.http.stream("POST", "/v1/completions", json=body | {"max_tokens": 180, "stream": True}) as response:
            for line in response.iter_lines():
                if killed and not waited:
                    waited = time.monotonic() - killed
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    came[choice["index"]] += choice["text"]
                if min(map(len, came)) > 40 and not killed:
                    os.kill(rank, signal.SIGKILL)
                    killed = time.monotonic()
        print(f"the next token came {waited:.2f} s after the kill")
        assert came == [choice["text"] for choice in alone]
        assert running.llm.last_loss == f"rank 1 (stage 1, process {rank}) ended with signal SIGKILL"
    finally:
        running.close()


def test_a_killed_stage_is_told(tiny_model):
    """In a process of its own: a stream that waits for who is gone may wait for ever."""
    ran = subprocess.run(
        [sys.executable, str(LOSS), str(tiny_model), json.dumps(SETTINGS)],
        env=os.environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    killed, _, told = ran.stdout.strip().splitlines()[-1].partition(": ")
    assert told == f"rank 1 (stage 1, process {killed}) ended with signal SIGKILL"
