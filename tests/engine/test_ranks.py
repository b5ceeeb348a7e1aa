"""A model divided among ranks gives the tokens of one process, whatever is asked of it. Ranks are processes here, too."""

import json
from pathlib import Path

import pytest
import torch
from divided_model import (
    GREEDY,
    SEEDED,
    check_grammars_and_several_answers,
    check_logprobs,
    check_prefix_hits,
    family_engine,
    ids,
)
from safetensors.torch import save_file
from tiny import TEXT, open_model

from forked import nursery
from oracle import TINY
from quire import SamplingParams
from quire.engine.executor import workers
from quire.types.errors import ConfigError, InvalidParameter, NotSupported

PROMPTS = [
    torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (33, 5, 18, 49)
]


@pytest.fixture(scope="module", autouse=True)
def _forked(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


# key heads fewer than ranks, heads that are not divided evenly; whole experts, and parts of each
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "mixtral", "qwen3-moe"])
def test_ranks_give_the_tokens_of_one_process(checkpoint, name):
    directory = checkpoint(name).directory
    alone = family_engine(directory)
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(alone, prompts, params)
    held = alone.collective_rpc("describe_rank")[0]["parameters"]
    for size in (2, 3):
        experts = (name, size) in (("mixtral", 3), ("qwen3-moe", 2))
        llm = family_engine(directory, tensor_parallel_size=size, enable_expert_parallel=experts, async_scheduling=size == 3)
        try:
            assert ids(llm, prompts, params) == expected
            told = llm.collective_rpc("describe_rank")
            assert [rank["rank"] for rank in told] == list(range(size)) and llm.get_world_size() == size
            assert sum(rank["heads"] for rank in told) == 6 and len({rank["pid"] for rank in told}) == size
            assert all(rank["parameters"] < 0.8 * held for rank in told)
        finally:
            llm.llm_engine.shutdown()
    alone.llm_engine.shutdown()


@pytest.fixture(scope="module")
def divided(tiny_model, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("traces"))
    traces = {"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False}
    llm = open_model(tiny_model, distributed_executor_backend="mp", tensor_parallel_size=2, profiler_config=traces)
    yield llm
    llm.llm_engine.shutdown()


def test_grammars_and_several_answers(divided, shared_llm):
    check_grammars_and_several_answers(divided, shared_llm)


def test_logprobs_are_close_and_of_the_same_tokens(divided, shared_llm):
    check_logprobs(divided, shared_llm)


def test_prefix_hits(divided, shared_llm):
    check_prefix_hits(divided, shared_llm)


def test_a_model_that_drafts(tiny_model, shared_llm, tmp_path):
    """And a head that uses the model's own matrices: all ranks have it whole, and draft side by side."""
    weights = torch.Generator().manual_seed(1)
    save_file(
        {f"{i}.0.linear.weight": torch.randn(32, 32, generator=weights) for i in range(2)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa", "medusa_num_heads": 2, "hidden_size": 32}))
    constrained = SamplingParams(temperature=0.0, max_tokens=30, structured_outputs={"regex": "[a-c]{9}x"})
    for path in (tiny_model, tmp_path):
        config = {"model": str(path), "num_speculative_tokens": 2, "adaptive": False}
        llm = open_model(tiny_model, tensor_parallel_size=2, num_gpu_blocks_override=60, speculative_config=config)
        try:
            for params in (GREEDY, SEEDED, constrained):
                assert ids(llm, TEXT, params) == ids(shared_llm, TEXT, params)
            drafts = llm.llm_engine.core.stats.drafts
            assert drafts.tokens > 20 and (path == tmp_path or drafts.accepted > 10)
        finally:
            llm.llm_engine.shutdown()


def test_drafts(tiny_model, shared_llm):
    """All ranks run them, and are told what was drawn."""
    config = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False, "suffix_decoding_max_spec_factor": 2.0}
    llm = open_model(tiny_model, tensor_parallel_size=2, num_gpu_blocks_override=60, speculative_config=config)
    try:
        for params in (
            GREEDY,
            SEEDED,
            SamplingParams(temperature=0.0, max_tokens=30, structured_outputs={"regex": "[a-c]{9}x"}),
        ):
            for _ in range(2):  # the second time the answers are known
                assert ids(llm, TEXT, params) == ids(shared_llm, TEXT, params)
        drafts = llm.llm_engine.core.stats.drafts
        assert 0 < drafts.accepted < drafts.tokens
    finally:
        llm.llm_engine.shutdown()


def test_preemption(tiny_model, shared_llm):
    llm = open_model(tiny_model, tensor_parallel_size=3, num_gpu_blocks_override=20, max_model_len=64)
    try:
        prompts = [text[:20] for text in TEXT] * 2
        assert ids(llm, prompts, SEEDED) == ids(shared_llm, prompts, SEEDED)
        assert llm.llm_engine.core.stats.preemptions > 0
    finally:
        llm.llm_engine.shutdown()


def test_what_ranks_can_be_asked(divided, shared_llm):
    assert divided.collective_rpc("check_health") == [None, None]
    assert shared_llm.collective_rpc("check_health") == [None]
    with pytest.raises(InvalidParameter, match="ranks have no method 'close'; they have check_health"):
        divided.collective_rpc("close")
    with pytest.raises(NotSupported, match="no code is sent"):
        divided.collective_rpc(lambda worker: worker)
    with pytest.raises(NotSupported, match="takes no arguments"):
        divided.collective_rpc("check_health", args=(1,))


def test_every_rank_writes_a_trace(divided, shared_llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)  # every operation of a step is in the trace
    divided.start_profile()
    assert ids(divided, TEXT, params) == ids(shared_llm, TEXT, params)
    files = divided.stop_profile()
    assert len(files) == 2 and all(Path(file).stat().st_size > 1000 for file in files)
    pids = [rank["pid"] for rank in divided.collective_rpc("describe_rank")]
    assert [f"-{pid}.pt.trace" in file for pid, file in zip(pids, files, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("llama", {"tensor_parallel_size": 7}, "6 attention heads cannot be divided among that many ranks; use at most 6"),
        ("llama", {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni' has one rank"),
        ("llama", {"tensor_parallel_size": 2, "distributed_executor_backend": "fake"}, "'fake' has one rank"),
        ("llama", {"tensor_parallel_size": 2, "model_impl": "transformers"}, "only models of Quire's families can be divided"),
        ("llama", {"enable_expert_parallel": True}, "LlamaForCausalLM has no experts"),
        (
            "llama",
            {"tensor_parallel_size": 7, "pipeline_parallel_size": 4, "model_impl": "transformers"},
            r"^tensor_parallel_size=7[^\n]* LlamaForCausalLM is run by transformers[^\n]*$",
        ),
        (
            "mixtral",
            {"enable_expert_parallel": True, "tensor_parallel_size": 6},
            "5 experts cannot be divided among 6 ranks; without it each has a part of every expert$",
        ),
        (
            "mixtral",
            {"enable_expert_parallel": True, "data_parallel_size": 9},
            r"5 experts cannot be divided among 9 ranks \(9 engines\); without it each engine has all of them$",
        ),
        ("llama", {"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(checkpoint, name, args, message):
    with pytest.raises(ConfigError, match=message):
        family_engine(checkpoint(name).directory, **args)
