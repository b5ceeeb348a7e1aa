"""Adapters of a model that ranks share, and of several engines: tokens are those of one process."""

import os
import signal
import time
from dataclasses import replace

import pytest
from test_adapters_llm import BAD, GREEDY, PROMPT, expected  # noqa: F401 (a fixture)
from tiny import TEXT, open_model

from adapter_files import write_adapter as write_content
from adapters import IDS, write_adapter
from forked import nursery
from patience import PATIENCE
from quire import SamplingParams
from quire.config.server_args import ServerArgs
from quire.engine.executor import workers
from quire.lora.request import LoRARequest
from quire.types.errors import AdapterChanged, AdapterError
from serving import Running, error_of


def test_ranks_have_their_shares(tiny_model, expected, tmp_path, monkeypatch):  # noqa: F811
    paths, answers = expected
    loras = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(paths.items(), start=1)} | {"none": None}
    tensors, config = BAD["nan"]
    bad = write_adapter(tmp_path / "bad", tensors, target_modules=["q_proj"], **config)
    read = workers.Workers.read_adapter

    def elsewhere(ranks, ref, **how):
        read(ranks, replace(ref, path=bad), **how)

    with nursery(tmp_path, "rank") as command:
        monkeypatch.setattr(workers, "COMMAND", command)
        for size, stages, places in ((2, 1, 2), (3, 1, 1), (1, 2, 1)):  # with one place they make way for each other
            llm = open_model(
                tiny_model, dtype="float32", enable_lora=True, max_loras=places, tensor_parallel_size=size,
                pipeline_parallel_size=stages, fully_sharded_loras=True,
            )  # fmt: skip
            with pytest.raises(AdapterError, match="q_proj"):
                llm.llm_engine.add_lora(LoRARequest("bad", 9, bad))
            with monkeypatch.context() as patch, pytest.raises(AdapterChanged, match="have changed since"):
                patch.setattr(workers.Workers, "read_adapter", elsewhere)
                llm.llm_engine.add_lora(loras["all"])  # the others find other files there
            for order in (["all", "none", "some", "some", "none", "all"], ["none", "some", "all"]):
                outputs = llm.generate(
                    [PROMPT] * len(order), GREEDY, use_tqdm=False, lora_request=[loras[name] for name in order]
                )
                assert [output.outputs[0].token_ids for output in outputs] == [answers[name] for name in order]
            assert llm.llm_engine.remove_lora(1) and llm.llm_engine.list_loras() == {2}
            llm.llm_engine.core.adapters.check()
            llm.llm_engine.shutdown()


def test_every_engine_has_every_adapter(tiny_model, expected, tmp_path, quick):  # noqa: F811
    """Over HTTP: loads, replacements and removals reach all of them, and one that was killed and started again."""
    paths, answers = expected
    running = Running(tiny_model, dtype="float32", enable_lora=True, max_loras=2, data_parallel_size=2)
    try:
        with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:

            def tokens(model: str, engine: int) -> object:
                body = {"prompt": IDS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 12}
                told = http.post("/v1/completions", json=body | {"model": model}, headers={"X-data-parallel-rank": str(engine)})
                return told.json()["choices"][0]["token_ids"] if told.status_code == 200 else told.status_code

            def load(name: str, path: object, inplace: bool = False):
                body = {"lora_name": name, "lora_path": str(path), "load_inplace": inplace}
                return http.post("/v1/load_lora_adapter", json=body)

            assert load("some", paths["some"]).status_code == load("one", paths["all"]).status_code == 200
            tensors, config = BAD["nan"]
            bad = write_adapter(tmp_path / "bad", tensors, target_modules=["q_proj"], **config)
            assert "q_proj.lora_A" in error_of(load("bad", bad))["message"]
            for engine in (0, 1):
                assert tokens("one", engine) == answers["all"] and tokens("some", engine) == answers["some"]
                assert tokens("tiny", engine) == answers["none"]
            assert load("one", paths["some"], inplace=True).status_code == 200
            os.kill(running.llm.engines[1].pid, signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE
            while running.llm.restarts < 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert [tokens("one", engine) for engine in (0, 1)] == [answers["some"]] * 2
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
            assert [tokens("one", engine) for engine in (0, 1)] == [404, 404]
            assert tokens("some", 1) == answers["some"]
        running.wait_idle()
    finally:
        running.close()


def test_engines_offline(tiny_model, tmp_path, quick):
    """Without a model: tokens depend on the version that a row ran with."""
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    loras = [LoRARequest(f"a{n}", n, str(write_content(tmp_path / f"{n}", f"content {n}"))) for n in (1, 2, 3)]
    told = []
    for engines in (1, 2):
        llm = open_model(
            tiny_model, distributed_executor_backend="fake", enable_lora=True, max_loras=2, data_parallel_size=engines
        )
        wanted = [*loras, None] * 3
        outputs = llm.generate([TEXT[0]] * len(wanted), greedy, use_tqdm=False, lora_request=wanted)
        told.append([output.outputs[0].token_ids for output in outputs])
        assert llm.llm_engine.pin_lora(2) and llm.llm_engine.list_loras() == {1, 2, 3}
        with pytest.raises(AdapterError):
            llm.llm_engine.add_lora(LoRARequest("none", 7, str(tmp_path / "nowhere")))
        assert llm.llm_engine.remove_lora(2) and not llm.llm_engine.remove_lora(2)
        llm.llm_engine.shutdown()
    assert told[0] == told[1] and len({tuple(ids) for ids in told[0]}) == 4
