"""A model divided into the stages of a pipeline gives the tokens of one process, whatever is asked of it."""

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
from tiny import TEXT, open_model

from forked import nursery
from oracle import TINY
from quire.engine.executor import workers
from quire.types.errors import ConfigError

PROMPTS = [
    torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (33, 5, 18, 90)
]


@pytest.fixture(scope="module", autouse=True)
def _forked(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


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
    llm.llm_engine.core.scheduler.roster.check()
    llm.llm_engine.shutdown()


def test_grammars_and_several_answers(staged, shared_llm):
    check_grammars_and_several_answers(staged, shared_llm)


def test_logprobs_are_those_of_one_process(staged, shared_llm):
    check_logprobs(staged, shared_llm)


def test_prefix_hits(staged, shared_llm):
    check_prefix_hits(staged, shared_llm)


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
        engine.core.scheduler.roster.check()
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pipeline_parallel_size": 4}, "the model's 3 layers cannot be divided among that many stages; use at most 3"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "2,2"}, "divides 4 layers, and the model has 3"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,1,1"}, "is for 3 stages, and pipeline_parallel"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "3,0"}, "must be how many layers each stage has"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni' has one rank"),
        ({"pipeline_parallel_size": 2, "model_impl": "transformers"}, "only models of Quire's families can be divided"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(checkpoint, args, message):
    with pytest.raises(ConfigError, match=message):
        family_engine(checkpoint("llama").directory, **args)
