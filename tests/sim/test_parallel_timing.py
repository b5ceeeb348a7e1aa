"""Step times of a model on several GPUs: shares of the work, and collectives."""

from dataclasses import replace

import pytest

from quire.config.memory import count_sums, parameter_parts
from quire.sim.analytic import AnalyticTiming, GPUModel, StepShape
from quire.sim.links import LINKS, NETWORKS, NO_LINK, Fabric, Span
from quire.sim.parallel import Layout, ModelSizes, ParallelTiming
from quire.types.cache import LayerCache

LLAMA = {
    "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 4096,
}  # fmt: skip
MOE = LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "n_shared_experts": 1}
CARD = GPUModel("a card", 2**35, 1e12, 1e14)
FAST, SLOW = Fabric(LINKS["nvlink4"], NETWORKS["ndr"]), Fabric(LINKS["pcie4"], NETWORKS["hdr"])
DECODE = StepShape(16, 16, 16, 16, 16000, 16000, 0, 0)


def sizes(hf=LLAMA) -> ModelSizes:
    layers = (LayerCache(4, 64),) * hf["num_hidden_layers"]
    return ModelSizes(parameter_parts(hf), layers, 1024, 32000, 2.0, 2, 2, *count_sums(hf))


def timing(fabric=FAST, hf=LLAMA, **layout) -> ParallelTiming:
    return ParallelTiming(CARD, fabric, Layout(**layout), sizes(hf))


def test_sums_are_counted() -> None:
    assert count_sums(LLAMA) == (16, 0)
    assert count_sums(MOE) == (24, 8)
    assert count_sums(MOE | {"n_shared_experts": 0, "first_k_dense_replace": 2}) == (16, 6)


def test_one_gpu_is_that_gpu() -> None:
    whole = replace(parameter_parts(LLAMA), embedding=0)
    alone = AnalyticTiming(CARD, whole, layers=8, weight_bytes=2.0, kv_bytes=8 * 4 * 64 * 2 * 2)
    for number in (timing(), timing(Fabric(NO_LINK)), timing(data=4)):
        assert number.seconds(DECODE) == number.latency(DECODE) == pytest.approx(alone.seconds(DECODE))
        assert number.exchange_seconds(DECODE) == number.host_seconds() == 0.0


def test_tensor_parallel_ranks_share_work_and_sum() -> None:
    one, two, four = (timing(tensor=size) for size in (1, 2, 4))
    work = [each.seconds(DECODE) - each.exchange_seconds(DECODE) for each in (one, two, four)]
    assert work[0] > work[1] > work[2] > work[0] / 4  # layers have a fixed cost
    states = 16 * 1024 * 2
    logits = 16 * 32000 * 4
    expected = 17 * FAST.all_reduce(states, Span(4)) + FAST.all_gather(logits, Span(4))  # two per layer, and the embeddings
    assert four.exchange_seconds(DECODE) == pytest.approx(expected)
    assert timing(SLOW, tensor=4).exchange_seconds(DECODE) > four.exchange_seconds(DECODE)
    assert timing(tensor=16).exchange_seconds(DECODE) > timing(tensor=8).exchange_seconds(DECODE)  # on two nodes
    assert four.host_seconds() == pytest.approx(17 * 152e-6)


def test_ranks_with_the_same_keys_read_them_all() -> None:
    """Four key heads on eight ranks: each has one."""
    keys = StepShape(1, 1, 1, 1, 1e7, 1e7, 0, 0)
    read = {
        size: timing(tensor=size).seconds(keys) - timing(tensor=size).seconds(replace(keys, own_keys=0.0)) for size in (4, 8)
    }
    assert read[4] == pytest.approx(read[8], rel=0.2)


def test_stages_take_turns() -> None:
    one, four = timing(), timing(pipeline=4)
    assert four.seconds(DECODE) < one.seconds(DECODE) / 2  # the first also has the head
    sends = 4 * FAST.send(16 * 1024 * 2, False)
    assert four.exchange_seconds(DECODE) == pytest.approx(sends)
    assert four.latency(DECODE) == pytest.approx(one.latency(DECODE) + sends, rel=0.01)
    first = ParallelTiming(CARD, FAST, Layout(pipeline=2), sizes(), "1,7")
    assert first.seconds(DECODE) > timing(pipeline=2).seconds(DECODE)
    across = timing(tensor=8, pipeline=2).exchange_seconds(DECODE) - timing(tensor=8).exchange_seconds(DECODE)
    assert across == pytest.approx(2 * FAST.send(16 * 1024 * 2, True))


def test_experts_of_several_engines_move_tokens_instead_of_sums() -> None:
    apart, shared = timing(hf=MOE, tensor=2, data=4), timing(hf=MOE, tensor=2, data=4, expert=True)
    states = 16 * 1024 * 2
    moved = 2 * FAST.all_to_all(states / 2 * 2, Span(8)) + FAST.all_gather(states, Span(2))
    expected = apart.exchange_seconds(DECODE) + 8 * (moved - FAST.all_reduce(states, Span(2)))
    assert shared.exchange_seconds(DECODE) == pytest.approx(expected)
    one = replace(DECODE, rows=1, singles=1, tokens=1, samples=1)
    assert timing(hf=MOE, tensor=2, expert=True).seconds(one) == pytest.approx(timing(hf=MOE, tensor=2).seconds(one))
    long = StepShape(1, 0, 1 << 14, 1, 0, 0, 0, 0)  # all experts have tokens: each engine runs as many as alone
    work = [each.seconds(long) - each.exchange_seconds(long) for each in (apart, shared)]
    assert work[0] == pytest.approx(work[1], rel=0.05)


def test_flags() -> None:
    assert Layout().flags == "-tp 1"
    assert Layout(2, 4, 8, True).flags == "-tp 2 -pp 4 -dp 8 -ep" and Layout(2, 4, 8).cards == 64
