"""Adapters through LLM and over HTTP, with a model: tokens are those of transformers with the additions in its matrices."""

import json
import os
import signal
import time

import pytest
import torch
from tiny import open_model
from transformers import LlamaForCausalLM

from adapters import IDS, KINDS, halves, merge, write_adapter
from patience import PATIENCE
from quire import SamplingParams
from quire.config.server_args import ServerArgs
from quire.lora.request import LoRARequest
from quire.types.errors import AdapterError
from serving import Running, error_of, events_of

PROMPT = {"prompt_token_ids": IDS}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def expected(tiny_model, tmp_path_factory):
    """Directories of adapters, and what transformers says with each and without one."""
    folder, answers, paths = tmp_path_factory.mktemp("adapters"), {}, {}
    for name in ("none", *KINDS):
        model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        if name in KINDS:
            paths[name] = merge(model, folder / name, *KINDS[name])
        with torch.inference_mode():
            found = model.generate(input_ids=torch.tensor([IDS]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        answers[name] = found[0, len(IDS) :].tolist()
    assert len(set(map(tuple, answers.values()))) == 3
    return paths, answers


def test_two_adapters_and_the_base_in_one_batch(tiny_model, expected):
    paths, answers = expected
    loras = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(paths.items(), start=1)} | {"none": None}
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "adaptive": False}
    for places, pages, spec in ((2, 200, guesses), (1, 200, None), (2, 24, None)):  # at once; one by one; with preemptions
        llm = open_model(
            tiny_model, dtype="float32", enable_lora=True, max_loras=places, num_gpu_blocks_override=pages, max_num_seqs=6,
            speculative_config=spec,
        )  # fmt: skip
        for order in (["all", "none", "some", "some", "none", "all"], ["none", "some", "all"]):
            outputs = llm.generate([PROMPT] * len(order), GREEDY, use_tqdm=False, lora_request=[loras[name] for name in order])
            assert [output.outputs[0].token_ids for output in outputs] == [answers[name] for name in order]
        [several] = llm.generate(PROMPT, SamplingParams(n=2, seed=1, max_tokens=6), use_tqdm=False, lora_request=loras["all"])
        assert len(several.outputs) == 2
        core = llm.llm_engine.core
        core.step()
        core.scheduler.roster.check()
        core.adapters.check()
        stats = core.stats
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
        llm.llm_engine.shutdown()


BAD = {
    "nan": ({f"{Q_PROJ}.lora_A.weight": torch.full((2, 32), float("nan")), f"{Q_PROJ}.lora_B.weight": torch.ones(32, 2)}, {}),
    "huge": (halves(Q_PROJ, 32, 32) | {f"{Q_PROJ}.lora_A.weight": torch.full((2, 32), 3e38)}, {}),
    "shape": (halves(Q_PROJ, 31, 32), {}),
    "unknown": (halves("base_model.model.model.layers.9.self_attn.q_proj", 32, 32), {}),
}


def test_bad_adapters_name_the_tensor_and_change_nothing(tiny_model, expected, tmp_path):
    paths, answers = expected
    llm = open_model(tiny_model, dtype="float32", enable_lora=True, max_lora_rank=4)
    for number, (name, (tensors, config)) in enumerate(BAD.items(), start=5):
        path = write_adapter(tmp_path / name, tensors, target_modules=["q_proj"], **config)
        with pytest.raises(AdapterError, match="q_proj"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=LoRARequest(name, number, path))
    large = write_adapter(tmp_path / "large", halves(Q_PROJ, 32, 32, rank=5), target_modules=["q_proj"], r=5)
    with pytest.raises(AdapterError, match="5"):
        llm.llm_engine.add_lora(LoRARequest("large", 9, large))
    assert llm.llm_engine.list_loras() == set()
    [output] = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=LoRARequest("all", 1, str(paths["all"])))
    assert output.outputs[0].token_ids == answers["all"]
    llm.llm_engine.shutdown()


def test_served_and_the_engine_killed(tiny_model, expected, tmp_path, quick):
    paths, answers = expected
    running = Running(tiny_model, dtype="float32", enable_lora=True, max_loras=2)
    try:
        with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:
            for name, path in paths.items():
                assert http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}).status_code == 200
            tensors, config = BAD["nan"]
            bad = write_adapter(tmp_path / "bad", tensors, target_modules=["q_proj"], **config)
            error = error_of(http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": bad}))
            assert error["code"] == 400 and "q_proj.lora_A" in error["message"]
            body = {"prompt": IDS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            for name, model in (("none", "tiny"), ("all", "all"), ("some", "some")):
                told = http.post("/v1/completions", json=body | {"model": model, "max_tokens": 12}).json()
                assert told["choices"][0]["token_ids"] == answers[name]
            long = body | {"model": "some", "max_tokens": 200}
            whole = http.post("/v1/completions", json=long).json()["choices"][0]["text"]
            with http.stream("POST", "/v1/completions", json=long | {"stream": True}) as stream:
                lines = stream.iter_lines()
                first = next(lines)
                os.kill(running.llm.engine_pid, signal.SIGKILL)
                events = events_of("\n\n".join(line for line in [first, *lines] if line))
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole
            deadline = time.monotonic() + PATIENCE
            while running.llm.restarts < 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert running.llm.restarts == 1 and json.dumps(events[-1]) == '"[DONE]"'
        running.wait_idle()
    finally:
        running.close()
