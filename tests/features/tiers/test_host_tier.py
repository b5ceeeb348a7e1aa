"""Pages in host memory through the front door: tokens do not depend on where pages were."""

import pytest

from quire import LLM, SamplingParams
from quire.cache.tiers import HostTier
from quire.types.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CONVERSATIONS = [[(i * 7 + j * 3) % 50 + 3 for j in range(40 + i)] for i in range(6)]
SMALL = {
    "device": "cpu", "num_gpu_blocks_override": 30, "max_model_len": 100, "block_size": 4, "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}  # fmt: skip
TIER = {"kv_offloading_size": 0.01, "preemption_mode": "swap"}


def turns(llm, count: int = 3) -> list[list[list[int]]]:
    """Let all conversations go on, in turns; return the tokens of each answer."""
    texts, answers = [list(text) for text in CONVERSATIONS], []
    for _ in range(count):
        outputs = llm.generate([{"prompt_token_ids": text} for text in texts], GREEDY, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        for text, answer in zip(texts, answers[-1], strict=True):
            text += [*answer, 5, 9, 2]
    return answers


def counts(llm: LLM):
    return llm.llm_engine.core.stats.tier


def plain_turns(directory: str, **args) -> list:
    llm = LLM(directory, **{**SMALL, **args})
    answers = turns(llm)
    llm.llm_engine.shutdown()
    return answers


def check(directory: str, expected: list, **args) -> None:
    """Compare an engine with host memory with one without."""
    llm = LLM(directory, **{**SMALL, **TIER, **args})
    assert turns(llm) == expected
    found = counts(llm)
    assert found.stored > 0 and found.fetched > 0 and found.hits > 0 and found.lost == 0
    llm.llm_engine.core.scheduler.roster.check()
    assert llm.reset_prefix_cache()
    assert counts(llm).used == 0
    llm.llm_engine.shutdown()


def test_conversations_come_back_from_host_memory_with_equal_tokens(model: str, expected: list):
    check(model, expected)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_caches_of_8_bits_come_back_with_their_scales(model: str, dtype: str):
    check(model, plain_turns(model, kv_cache_dtype=dtype), kv_cache_dtype=dtype)


@pytest.mark.parametrize(("family", "pages"), [("mistral-window", 30), ("qwen2-some-windows", 64), ("deepseek-v2", 30)])
def test_windows_and_latents_come_back(checkpoint, family: str, pages: int):
    directory = str(checkpoint(family).directory)
    args = {"skip_tokenizer_init": True, "num_gpu_blocks_override": pages}
    check(directory, plain_turns(directory, **args), **args)


def test_records_of_the_same_tokens_in_two_cache_groups_have_different_tags():
    tier, key = HostTier(4), b"k" * 32
    tier.evicted(1, ((0, key), b"tokens"))
    tier.evicted(2, ((1, key), b"tokens"))
    [(_, _, first), (_, _, second)] = tier.take_moves(0, lambda *_: True)[0]
    assert first != second


def test_two_stages_move_their_layers(model: str, expected: list):
    check(model, expected, pipeline_parallel_size=2)


def test_a_page_is_stored_before_a_fork_is_copied_to_it(model: str):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    answers = []
    for tier in ({}, TIER):
        llm = LLM(model, **SMALL, **tier)
        answers.append([])
        for _ in range(3):
            for text in CONVERSATIONS:
                [output] = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
                answers[-1].append([list(each.token_ids) for each in output.outputs])
        if tier:
            assert counts(llm).fetched > 0
        llm.llm_engine.shutdown()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("policy", ["lfu", "cost"])
def test_other_policies_evict_other_records_and_give_the_same_tokens(model: str, expected: list, policy: str):
    check(model, expected, cache_policy=policy, kv_offloading_size=40 * 4 * 2 * 2 * 2 * 8 * 4 / 2**30)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kv_offloading_size": 1e6}, "kv_offloading_size needs 1000000.00 GiB of host memory on this machine.* Lower it"),
        ({"kv_offloading_size": 1e-9}, "kv_offloading_size gives each rank 1 bytes, less than one page of 1024. Raise it"),
        ({"kv_offloading_size": -1}, "kv_offloading_size must be at least 0"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size must be a finite number, got nan"),
        ({"swap_space": float("inf")}, "swap_space must be a finite number, got inf"),
        ({**TIER, "kv_disk_path": "d", "kv_disk_size": float("nan")}, "kv_disk_size must be a finite number, got nan"),
        ({**TIER, "kv_disk_path": ""}, "kv_disk_path must be a directory; got ''. Give its path"),
        ({**TIER, "kv_disk_path": "a\0b"}, "kv_disk_path must be a directory; got 'a.x00b'. Give its path"),
        ({**TIER, "kv_disk_size": 5}, "kv_disk_size requires kv_disk_path"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "kv_offloading_size keeps pages in host memory"),
        ({"kv_offloading_size": 0.1, "enable_prefix_caching": False}, "requires enable_prefix_caching, by which pages"),
        ({"kv_offloading_size": 0.1, "swap_space": 1}, "swap_space 1 and kv_offloading_size 0.1 are two ways to write"),
        ({"preemption_mode": "swap"}, "preemption_mode swap requires kv_offloading_size"),
        ({"kv_offloading_eager": True}, "kv_offloading_eager requires kv_offloading_size"),
        ({"kv_offloading_size": 0.1, "kv_offloading_backend": "lmcache"}, "kv_offloading_backend must be one of native"),
    ],
)  # fmt: skip
def test_bad_sizes_are_named_at_the_start(model: str, args: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        LLM(model, **SMALL, **args)


@pytest.mark.parametrize("eager", [False, True])
def test_eager_stores_are_in_host_memory_before_anything_is_evicted(
    model: str, expected: list, monkeypatch: pytest.MonkeyPatch, eager: bool
):
    llm = LLM(model, **SMALL, **TIER, kv_offloading_eager=eager)
    core, prompts = llm.llm_engine.core, [{"prompt_token_ids": CONVERSATIONS[0]}]
    [output] = llm.generate(prompts, GREEDY, use_tqdm=False)
    while core.has_unfinished:
        core.step()
    assert counts(llm).used == (11 if eager else 0), "45 of the 46 tokens are in the cache: 11 full pages"
    launch = core.executor._runner.launch
    monkeypatch.setattr(core.executor._runner, "launch", lambda plan: 1 / 0)
    llm.generate([{"prompt_token_ids": [7, 8, 9]}], GREEDY, use_tqdm=False)  # fails, and empties the cache of the device
    monkeypatch.setattr(core.executor._runner, "launch", launch)
    [output] = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == (36 if eager else 0)
    assert list(output.outputs[0].token_ids) == expected[0][0]
    core.scheduler.roster.check()
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("args", [{"kv_offloading_size": 0}, {"swap_space": 0}, {}])
def test_without_host_memory_nothing_is_stored(model: str, args: dict):
    llm = LLM(model, **SMALL, **args)
    turns(llm, 1)
    assert counts(llm).records == 0
    llm.llm_engine.shutdown()


def test_preempted_requests_are_swapped_or_computed_again_as_the_mode_says(model: str):
    fetched = {}
    few = {**SMALL, "num_gpu_blocks_override": 16, "max_model_len": 60}
    prompts = [{"prompt_token_ids": text[:20]} for text in CONVERSATIONS[:4]]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    answers = []
    for mode in ("recompute", "swap"):
        llm = LLM(model, **few, swap_space=0.01, preemption_mode=mode)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        assert llm.llm_engine.core.stats.preemptions > 0
        fetched[mode] = counts(llm).fetched
        llm.llm_engine.shutdown()
    assert answers[0] == answers[1] and fetched["recompute"] == 0 < fetched["swap"]
