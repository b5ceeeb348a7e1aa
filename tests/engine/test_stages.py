"""A model divided into the stages of a pipeline gives the tokens of one process, whatever is asked of it."""

import pytest
import torch
from tiny import TEXT, open_model

from forked import nursery
from oracle import TINY
from quire import LLM, SamplingParams
from quire.engine.executor import workers
from quire.sampling_params import StructuredOutputsParams
from quire.types.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=16, ignore_eos=True)
PROMPTS = [
    torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (33, 5, 18, 90)
]


@pytest.fixture(scope="module", autouse=True)
def _forked(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


def family_engine(directory, **args) -> LLM:
    defaults = {
        "skip_tokenizer_init": True, "device": "cpu", "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 4 << 20,
    }  # fmt: skip
    return LLM(str(directory), **(defaults | args))


def ids(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(choice.error for output in outputs for choice in output.outputs)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


# (ranks of a stage, stages, layers of each)
GRIDS = {
    "llama": [(1, 2, None), (2, 2, "2,1")],
    "qwen2": [(1, 3, None)],
    "gemma3": [(1, 2, "3,2"), (2, 2, None)],
    "mixtral": [(1, 2, "2,1")],
    "qwen3-moe": [(2, 2, None)],
}


@pytest.mark.parametrize("name", list(GRIDS))
def test_stages_give_the_tokens_of_one_process(checkpoint, name):
    directory = checkpoint(name).directory
    alone = family_engine(directory)
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(alone, prompts, params)
    held = alone.collective_rpc("describe_rank")[0]["parameters"]
    for ranks, stages, partition in GRIDS[name]:
        llm = family_engine(
            directory, tensor_parallel_size=ranks, pipeline_parallel_size=stages, pipeline_layer_partition=partition,
            enable_expert_parallel=name == "qwen3-moe",
        )  # fmt: skip
        try:
            assert ids(llm, prompts, params) == expected
            told = llm.collective_rpc("describe_rank")
            assert [rank["rank"] for rank in told] == list(range(llm.get_world_size())) and len(told) == ranks * stages
            assert [rank["stage"] for rank in told] == [stage for stage in range(stages) for _ in range(ranks)]
            if ranks == 1:
                assert sum(rank["parameters"] for rank in told) == held  # also where the head is the embedding
            if partition is not None:
                assert [rank["layers"] for rank in told[::ranks]] == [int(size) for size in partition.split(",")]
        finally:
            llm.llm_engine.shutdown()
    alone.llm_engine.shutdown()


@pytest.fixture(scope="module")
def staged(tiny_model):
    llm = open_model(tiny_model, pipeline_parallel_size=2)
    yield llm
    llm.llm_engine.core.scheduler.check()
    llm.llm_engine.shutdown()


def test_grammars_and_several_answers(staged, shared_llm):
    for rules in ({"regex": "(fox|dog) [a-z]{3}"}, {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}):
        params = SamplingParams(
            temperature=0.8, seed=3, n=3, max_tokens=30, structured_outputs=StructuredOutputsParams(**rules), bad_words=["lazy"]
        )
        assert ids(staged, TEXT, params) == ids(shared_llm, TEXT, params)
    assert ids(staged, TEXT, GREEDY) == ids(shared_llm, TEXT, GREEDY)


def test_logprobs_are_those_of_one_process(staged, shared_llm):
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=4, prompt_logprobs=3, ignore_eos=True)
    for ours, theirs in zip(*(llm.generate(TEXT, params, use_tqdm=False) for llm in (staged, shared_llm)), strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for here, there in zip(
            [*ours.prompt_logprobs[1:], *ours.outputs[0].logprobs],
            [*theirs.prompt_logprobs[1:], *theirs.outputs[0].logprobs],
            strict=True,
        ):
            assert here.keys() == there.keys()
            assert all(abs(here[token].logprob - there[token].logprob) < 1e-4 for token in here)


def test_prefix_hits(staged, shared_llm):
    shared = "a page is a page, a quire is a gathering of pages "
    staged.generate(shared, GREEDY, use_tqdm=False)
    [output] = staged.generate(shared + "the fox", GREEDY, use_tqdm=False)
    assert output.num_cached_tokens > 0
    assert list(output.outputs[0].token_ids) == ids(shared_llm, [shared + "the fox"], GREEDY)[0][0]
    assert staged.reset_prefix_cache()


def test_every_stage_has_a_step(staged, shared_llm, monkeypatch):
    """Requests take turns: while one step is in the second stage, the first has another, of other requests."""
    core, seen = staged.llm_engine.core, []
    submit = core.executor.submit

    def note(plan):
        flight = submit(plan)
        seen.append((len(core.executor._open), plan.slot.tolist()))
        return flight

    monkeypatch.setattr(core.executor, "submit", note)
    assert ids(staged, TEXT, SEEDED) == ids(shared_llm, TEXT, SEEDED)
    busy = [slots for open_steps, slots in seen if open_steps == 2]
    assert len(busy) > 0.8 * len(seen)
    assert all(len(slots) <= len(TEXT) // 2 + 1 for slots in busy[4:])


def test_preemption_and_requests_that_leave(tiny_model, shared_llm):
    llm = open_model(tiny_model, pipeline_parallel_size=2, num_gpu_blocks_override=20, max_model_len=64)
    try:
        engine = llm.llm_engine
        prompts = [text[:20] for text in TEXT] * 2
        assert ids(llm, prompts, SEEDED) == ids(shared_llm, prompts, SEEDED)
        assert engine.core.stats.preemptions > 0
        for number in range(6):  # slots change hands while their steps are in flight
            engine.add_request(f"a{number}", prompts[0], GREEDY)
            engine.step()
            engine.step()
            engine.abort_request([f"a{number}"])
        while engine.has_unfinished_requests():
            engine.step()
        assert ids(llm, prompts, GREEDY) == ids(shared_llm, prompts, GREEDY)
        engine.core.scheduler.check()
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pipeline_parallel_size": 4}, "the model's 3 layers cannot be divided among so many stages; 3 is the most"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "2,2"}, "divides 4 layers, and the model has 3"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,1,1"}, "is for 3 stages, and pipeline_parallel"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "3,0"}, "must be how many layers each stage has"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni' has one rank"),
        ({"pipeline_parallel_size": 2, "model_impl": "transformers"}, "only models of a family of our own"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(checkpoint, args, message):
    with pytest.raises(ConfigError, match=message):
        family_engine(checkpoint("llama").directory, **args)
