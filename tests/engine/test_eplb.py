"""Experts that move between ranks by measured load: nobody notices."""

import random

import pytest
from test_ranks import GREEDY, PROMPTS, SEEDED, family_engine, ids

from forked import nursery
from quire.engine.executor import workers
from quire.features.experts.device import balance_of, place_experts, spread
from quire.layers.moe import FREE_SLOT
from quire.types.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _forked(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


@pytest.mark.parametrize(("name", "ranks", "copies"), [("qwen3-moe", 2, 3), ("mixtral", 3, 4)])
def test_experts_move_and_tokens_stay(checkpoint, name, ranks, copies):
    directory = checkpoint(name).directory
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(family_engine(directory), prompts, params)
    llm = family_engine(
        directory, tensor_parallel_size=ranks, enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=copies,
        eplb_config={"window_size": 4, "step_interval": 5, "log_balancedness": True, "use_async": False},
    )  # fmt: skip
    try:
        for _ in range(2):
            assert ids(llm, prompts, params) == expected
        told = llm.collective_rpc("describe_rank")
        assert len({rank["rebalanced"] for rank in told}) == 1 and told[0]["rebalanced"] >= 3
        assert sum(rank["moved_experts"] for rank in told) >= copies
    finally:
        llm.llm_engine.shutdown()


def test_experts_are_spread_by_load():
    numbers = random.Random(5)
    for _ in range(200):
        ranks, experts = numbers.randint(2, 6), numbers.randint(6, 40)
        places = [experts // ranks + (rank < experts % ranks) + numbers.randint(0, 2) for rank in range(ranks)]
        before = [[FREE_SLOT] * room for room in places]
        for _ in range(3):
            loads = [int(numbers.paretovariate(1.0)) for _ in range(experts)]
            after = place_experts(before, spread(loads, places), places)
            assert [len(one) for one in after] == places
            assert {expert for one in after for expert in one} - {FREE_SLOT} == set(range(experts))
            for old, new in zip(before, after, strict=True):  # whoever stays keeps its place
                assert all(new[old.index(expert)] == expert for expert in {*new} & {*old} - {FREE_SLOT})
            assert 0 < balance_of(loads, after) <= 1
            before = after


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("mixtral", {"enable_expert_parallel": True}, "tensor_parallel_size above 1, which is 1"),
        (
            "mixtral",
            {"enable_expert_parallel": True, "data_parallel_size": 2, "num_redundant_experts": 6},
            "with 2 ranks each of the 5 experts can have 2 copies, so 5 is the most",
        ),
        ("mixtral", {"tensor_parallel_size": 2}, "enable_eplb needs whole experts on several ranks"),
        ("mixtral", {"enable_eplb": False, "num_redundant_experts": 2}, "do nothing without enable_eplb"),
        (
            "llama",
            {"tensor_parallel_size": 2, "num_redundant_experts": 3},
            "^enable_eplb: LlamaForCausalLM has no experts; leave that out$",
        ),
        (
            "mixtral",
            {"tensor_parallel_size": 2, "num_redundant_experts": 6},
            r"^enable_eplb needs whole experts on several ranks[^\n]*$",
        ),
        ("mixtral", {"eplb_config": {"windows": 2}}, "eplb_config: unknown windows; known are window_size"),
        ("mixtral", {"eplb_config": {"step_interval": 0}}, "eplb_config.step_interval must be a number, at least 1, got 0"),
        ("mixtral", {"eplb_config": {"num_redundant_experts": 1}, "num_redundant_experts": 2}, "say it once"),
        ("mixtral", {"enable_expert_parallel": True, "tensor_parallel_size": 2, "num_redundant_experts": 6}, "5 is the most"),
        (
            "mixtral",
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "enable_lora": True},
            "is not supported with enable_lora",
        ),
    ],
)
def test_what_cannot_be_balanced(checkpoint, name, args, message):
    with pytest.raises(ConfigError, match=message):
        family_engine(checkpoint(name).directory, **({"enable_eplb": True} | args))
