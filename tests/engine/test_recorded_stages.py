"""Stages as on GPUs, played by CPUs: layers are recorded and replayed, and hidden states handed on as from card to card. The
tokens are those of one process."""

import pytest
from recorded_steps import PAGE, recording  # noqa: F401
from tiny import TEXT

from oracle import TINY
from quire import LLM, SamplingParams
from quire.device.base import Device
from quire.device.cpu.device import CPUDevice
from quire.device.cuda.channel import CUDAEnds, CUDAInlet, FromHost
from quire.engine.executor import workers
from quire.runner import warmup
from quire.runner.stage import StageRunner
from quire.runner.step import Runner
from quire.sampling_params import StructuredOutputsParams
from thread_ranks import Cards, ThreadWorkers

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True, logprobs=2)
PROMPTS = [[(7 * i + 3 * n) % (TINY["vocab_size"] - 3) + 3 for i in range(n)] for n in (33, 5, 90, 18)]
PARAMS = [GREEDY, SEEDED, GREEDY, SEEDED]


def open_engine(directory, **args) -> LLM:
    defaults = {
        "skip_tokenizer_init": True, "device": "cpu", "block_size": PAGE, "max_num_seqs": 8, "max_num_batched_tokens": 48,
        "kv_cache_memory_bytes": 4 << 20,
    }  # fmt: skip
    return LLM(str(directory), **(defaults | args))


def ids(llm, prompts=PROMPTS, params=PARAMS):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(choice.error for output in outputs for choice in output.outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Rooms:
    """What the ranks of the engines of a test have."""

    def __init__(self):
        self.cards, self.ranks, self.reach = [], [], {}

    def runners(self, llm):
        return [llm.llm_engine.core.executor._runner, *(rank._runner for rank in self.ranks[1:])]


@pytest.fixture
def rooms(monkeypatch, recording):  # noqa: F811
    rooms = Rooms()

    def channel(_, shape, neighbours, watch):
        rooms.cards.append(Cards(**rooms.reach))
        return CUDAEnds(shape, neighbours, watch, rooms.cards[-1])

    def start(*args):
        rooms.cards = []
        workers = ThreadWorkers(*args)
        rooms.ranks = workers.ranks
        return workers

    monkeypatch.setattr(Device, "channel", channel)
    monkeypatch.setattr(workers, "Workers", start)
    return rooms


@pytest.fixture
def warming(monkeypatch):
    """Steps are run before the first request, as where kernels are compiled. What could not be run by itself, and is not
    another stage's."""
    failed = []

    def note(message, *args, exc_info=None):
        if "OtherStage" not in str(exc_info):
            failed.append(exc_info)

    monkeypatch.setattr(CPUDevice, "compiles", True)
    monkeypatch.setattr(warmup.logger, "debug", note)
    return failed


def compare(directory, rooms, what=lambda llm: ids(llm), alone=(), **args):
    """The same as one process, which launches all."""
    llm = open_engine(directory, enforce_eager=True, **dict(alone))
    expected = what(llm)
    llm.llm_engine.shutdown()
    llm = open_engine(directory, **args)
    try:
        assert what(llm) == expected
        llm.llm_engine.core.scheduler.roster.check()
        return [
            (runner.graphs, getattr(runner, "_ends", None) and runner._ends.inlet) for runner in rooms.runners(llm)
        ], llm.llm_engine.core.stats
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.parametrize(("name", "stages"), [("llama", 2), ("gemma3", 3)])
def test_recorded_stages_give_the_tokens_of_one_process(checkpoint, rooms, name, stages):
    def twice(llm):
        return ids(llm), ids(llm, [PROMPTS[2], [*PROMPTS[2][:80], 9, 9]], GREEDY)  # the second time there are prefix hits

    ranks, _ = compare(checkpoint(name).directory, rooms, twice, pipeline_parallel_size=stages)
    assert len(ranks) == len(rooms.cards) == stages
    assert {(card.freed, card.closed) for card in rooms.cards} <= {(0, 0), (1, 1)} and any(card.freed for card in rooms.cards)
    for graphs, inlet in ranks:
        assert graphs.replays > 20 and graphs.captures > 1 and isinstance(inlet, CUDAInlet)


@pytest.mark.parametrize("reach", [{"reach": False}, {"shares": False}])
def test_cards_that_do_not_reach_each_other(checkpoint, rooms, reach):
    rooms.reach = reach
    ranks, _ = compare(checkpoint("llama").directory, rooms, pipeline_parallel_size=2)
    assert all(isinstance(inlet, FromHost) for _, inlet in ranks)
    assert [card.freed for card in rooms.cards] == [int("reach" in reach)] * 2


def test_drafts(checkpoint, rooms):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    prompts = [PROMPTS[0][:6] * 5, PROMPTS[1] * 4, PROMPTS[3]]
    ranks, stats = compare(
        checkpoint("llama").directory,
        rooms,
        lambda llm: ids(llm, prompts, PARAMS[:3]),
        pipeline_parallel_size=2,
        speculative_config=drafts,
    )
    assert stats.drafts.tokens > 0 and all(graphs.replays > 3 for graphs, _ in ranks)


def test_ranks_draw_each_for_itself(checkpoint, rooms, monkeypatch):
    """As those on GPUs do, and are told nothing; `seed` is all that a draw needs."""
    monkeypatch.setattr(CPUDevice, "samples_alike", True)
    monkeypatch.setattr(StageRunner, "take_sampled_of", None)
    monkeypatch.setattr(Runner, "take_sampled", None)
    for stages in (1, 2):
        compare(checkpoint("llama").directory, rooms, tensor_parallel_size=2, pipeline_parallel_size=stages)


def test_masks_are_told(tiny_model, rooms, monkeypatch):
    """Of steps in which some rows have one, what was drawn is."""
    monkeypatch.setattr(CPUDevice, "samples_alike", True)
    rules = SamplingParams(temperature=0.8, seed=3, structured_outputs=StructuredOutputsParams(regex="(fox|dog) [a-z]{5}"))
    for stages in (1, 2):
        compare(
            tiny_model,
            rooms,
            lambda llm: ids(llm, TEXT, [rules, SEEDED, GREEDY]),
            alone={"skip_tokenizer_init": False},
            skip_tokenizer_init=False,
            tensor_parallel_size=2,
            pipeline_parallel_size=stages,
        )


def test_ranks_of_stages_launch_all(checkpoint, rooms, warming):
    """Recorded steps cannot wait for other ranks. Before, layers were run by themselves, on every rank its own."""
    ranks, _ = compare(checkpoint("llama").directory, rooms, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert len(ranks) == 4 and all(graphs is None for graphs, _ in ranks) and not warming


def test_preemption(checkpoint, rooms, warming):
    ranks, stats = compare(
        checkpoint("llama").directory, rooms, pipeline_parallel_size=2, num_gpu_blocks_override=12, max_model_len=128
    )
    assert stats.preemptions > 0 and all(graphs.replays > 10 for graphs, _ in ranks) and not warming
