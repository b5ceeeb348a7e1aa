"""Snapshots of recurrent states in host memory and on disk: a hit has the tokens and the logprob bits of a miss."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_host_tier import counts

from oracle import Checkpoint, make_checkpoint, open_checkpoint
from patience import wait_for
from quire import LLM, SamplingParams
from quire.cache.tiers import STATES
from quire.cli.memory_plan import make_plan
from quire.cli.plan import render
from quire.config.args import EngineArgs
from quire.features.tiers.disk import FIELDS, HEADER_BYTES
from quire.types.errors import ConfigError
from recurrent_families import RECURRENT
from serving import NAME, Running
from tiny_model import make_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)
LENGTH, PAGE, HIT = 41, 4, 40  # tokens of a prompt, of a page, and before a prompt's snapshot
PROMPTS = [[(i * 7 + j * 3) % 50 + 3 for j in range(LENGTH)] for i in range(4)]
# Mamba 2, gated delta net and short convolutions beside attention, and Mamba 1 alone
FAMILIES = ("bamba", "qwen3-next", "lfm2", "mamba")
HEADS_OF_16 = {"num_attention_heads": 3, "num_key_value_heads": 1}  # kernels whose bits do not depend on the batch run them
SLOTS, SNAPSHOTS = 2, 2  # on the device
DISK_GIB = 0.01


@pytest.fixture(scope="module")
def hybrid(checkpoint, tmp_path_factory):
    """hybrid(name) -> a tiny checkpoint of a family with recurrent layers."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in ("bamba", "lfm2"):
            return checkpoint(name)
        if name not in made:
            directory, family = tmp_path_factory.mktemp(name), RECURRENT[name]
            make_checkpoint(replace(family, settings={**family.settings, **HEADS_OF_16}), directory)
            make_tokenizer(directory)
            made[name] = open_checkpoint(directory)
        return made[name]

    return get


def settings(case: Checkpoint, **args) -> dict:
    """Return the arguments of an engine whose device holds the pages of two prompts, and SNAPSHOTS."""
    share = 4 if case.facts.layers else 1  # snapshots take a quarter of the memory that slots leave
    memory = (SLOTS + 1 + share * SNAPSHOTS) * sum(state.bytes(4) for state in case.facts.states)
    defaults = {
        "dtype": "float32", "device": "cpu", "block_size": PAGE, "max_num_seqs": SLOTS, "max_model_len": 80,
        "max_num_batched_tokens": 64, "kv_cache_memory_bytes": memory, "num_gpu_blocks_override": 24,
        "kv_offloading_size": 0.01,
    }  # fmt: skip
    return defaults | args


def start(case: Checkpoint, **args) -> LLM:
    return LLM(str(case.directory), skip_tokenizer_init=True, **settings(case, **args))


def on_disk(path: Path) -> dict:
    return {"kv_disk_path": str(path), "kv_disk_size": DISK_GIB}


def stop(llm: LLM) -> None:
    llm.llm_engine.core.scheduler.roster.check()
    llm.llm_engine.shutdown()


def run(llm: LLM) -> tuple[list, list[int]]:
    """Return each prompt's tokens and logprobs, and how many of its tokens were found. One prompt runs at a time."""
    answers, cached = [], []
    for prompt in PROMPTS:
        [output] = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        [answer] = output.outputs
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        answers.append([(token, step[token].logprob) for token, step in pairs])
        cached.append(output.num_cached_tokens)
    return answers, cached


def test_device_and_prompts_are_as_the_tests_need_them(hybrid):
    llm = start(hybrid("bamba"))
    tables = llm.llm_engine.core.scheduler._tables
    assert tables.snapshots.count == SNAPSHOTS and tables.pool.pages < len(PROMPTS) * HIT // PAGE
    stop(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_in_host_memory_on_disk_and_after_a_restart_have_the_bits_of_misses(hybrid, tmp_path: Path, family: str):
    case = hybrid(family)
    llm = start(case, **on_disk(tmp_path))
    expected, cached = run(llm)
    assert cached == [0] * 4
    assert run(llm) == (expected, [HIT] * 4)
    found = counts(llm)
    assert found.hits == 4 * HIT and found.read == found.lost == 0
    each = llm.llm_engine.core.scheduler.tier._snapshot_records + (HIT // PAGE if case.facts.layers else 0)
    assert found.stored == found.used == 4 * each
    stop(llm)
    llm = start(case, **on_disk(tmp_path), kv_offloading_size=2 * each * found.page_bytes / 2**30)  # two prompts
    for _ in range(2):
        assert run(llm) == (expected, [HIT] * 4)
    found = counts(llm)
    assert found.records == 2 * each and found.read > 6 * each and found.lost == 0
    assert llm.reset_prefix_cache()
    assert counts(llm).used == counts(llm).on_disk == 0
    assert run(llm) == (expected, [0] * 4)
    stop(llm)


@pytest.mark.parametrize("policy", ["lfu", "cost"])
def test_policies_evict_pages_and_snapshots_from_one_memory(hybrid, policy: str):
    """Without a disk, host memory of two prompts cannot serve four in turn."""
    case = hybrid("lfm2")
    llm = start(case, cache_policy=policy)
    expected, _ = run(llm)
    each = llm.llm_engine.core.scheduler.tier._snapshot_records + HIT // PAGE
    size = 2 * each * counts(llm).page_bytes / 2**30
    stop(llm)
    llm = start(case, cache_policy=policy, kv_offloading_size=size)
    for _ in range(3):
        answers, cached = run(llm)
        assert answers == expected and set(cached) <= {0, HIT}
        llm.llm_engine.core.scheduler.roster.check()
    assert counts(llm).used <= 2 * each < counts(llm).stored
    stop(llm)


def test_a_snapshot_whose_bits_changed_in_memory_is_computed_again(hybrid):
    llm = start(hybrid("qwen3-next"))
    expected, _ = run(llm)
    assert run(llm) == (expected, [HIT] * 4)
    tier, arena = llm.llm_engine.core.scheduler.tier, tiers_part(llm)._arena
    snapshots = [tier.all_records(record) for record, content in tier._content.items() if content[0][0] == STATES]
    for number, records in enumerate(snapshots):
        arena.memory[records[number % len(records)], 8 * number] ^= 1 << number
    assert len(snapshots) == 4 and run(llm) == (expected, [0] * 4)
    assert counts(llm).lost == 4
    assert run(llm) == (expected, [HIT] * 4)
    stop(llm)


@pytest.mark.parametrize("fault", ["flip", "truncate", "delete"])
def test_what_happens_to_snapshots_on_disk_changes_no_bit(hybrid, tmp_path: Path, fault: str):
    case = hybrid("bamba")
    llm = start(case, **on_disk(tmp_path))
    expected, _ = run(llm)
    record = counts(llm).page_bytes
    stop(llm)
    [file] = tmp_path.glob("*/lane-*/*.kv")
    spans = [(begin, end) for begin, end in contents(file) if end - begin > record]
    assert len(spans) == 4
    if fault == "truncate":
        os.truncate(file, spans[-1][1] - 100)
    llm = start(case, **on_disk(tmp_path))
    if fault == "flip":  # while the engine has it open
        with file.open("r+b") as out:
            for number, (begin, end) in enumerate(spans):
                flip(out, begin + (end - begin) * number // 4, number)
    elif fault == "delete":
        file.unlink()
    answers, cached = run(llm)
    assert answers == expected
    assert cached == {"flip": [0] * 4, "truncate": [HIT] * 3 + [0], "delete": [HIT] * 4}[fault]
    assert counts(llm).lost == (4 if fault == "flip" else 0)
    assert run(llm) == (expected, [HIT] * 4)
    stop(llm)


def contents(file: Path) -> list[tuple[int, int]]:
    """Return where the contents of the records of a segment begin and end."""
    data, position, found = file.read_bytes(), 0, []
    while position < len(data):
        length = FIELDS.unpack_from(data, position)[2]
        found.append((position + HEADER_BYTES, position + HEADER_BYTES + length))
        position = found[-1][1]
    return found


def flip(file, position: int, bit: int) -> None:
    file.seek(position)
    [byte] = file.read(1)
    file.seek(position)
    file.write(bytes([byte ^ 1 << bit]))


def tiers_part(llm: LLM):
    return next(part for part in llm.llm_engine.core.executor._runner._parts if part.name == "tiers")


def test_the_next_turn_of_a_conversation_finds_the_latest_snapshot_of_the_answer_on_disk(hybrid, tmp_path: Path):
    case, params = hybrid("qwen3-next"), SamplingParams(temperature=0.0, max_tokens=27, ignore_eos=True)
    llm = start(case, **on_disk(tmp_path))
    [output] = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    text = [*PROMPTS[0], *output.outputs[0].token_ids, 5, 9]
    core = llm.llm_engine.core
    while core.has_unfinished:  # the last pages are stored
        core.step()
    stop(llm)
    found = []
    for path in (tmp_path, tmp_path / "empty"):
        llm = start(case, **on_disk(path))
        [output] = llm.generate([{"prompt_token_ids": text}], GREEDY, use_tqdm=False)
        found.append((output.num_cached_tokens, list(output.outputs[0].token_ids)))
        stop(llm)
    assert [cached for cached, _ in found] == [64, 0]  # every 16 sampled tokens
    assert found[0][1] == found[1][1]


def test_preempted_requests_are_swapped_or_computed_again_as_the_mode_says(hybrid):
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt[:20]} for prompt in PROMPTS]
    answers, fetched = [], []
    for args in ({"preemption_mode": "recompute"}, {"preemption_mode": "swap"}, {"num_gpu_blocks_override": 99}):
        llm = start(hybrid("bamba"), **{"num_gpu_blocks_override": 16, "max_model_len": 60, **args})
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        fetched.append((llm.llm_engine.core.stats.preemptions > 0, counts(llm).fetched > 0))
        stop(llm)
    assert answers[0] == answers[1] == answers[2]
    assert fetched == [(True, False), (True, True), (False, False)]


@pytest.mark.parametrize(("division", "size"), [("tensor_parallel_size", 32 << 10), ("pipeline_parallel_size", 56 << 10)])
def test_every_rank_has_its_share_of_snapshots_in_memory_and_on_disk(hybrid, tmp_path: Path, division: str, size: int):
    """In a pipeline, the first stage has a recurrent layer and one of attention, the second one a recurrent layer only."""
    llm = start(hybrid("qwen3-next"), **{division: 2}, **on_disk(tmp_path), kv_offloading_size=size / 2**30)
    expected, cached = run(llm)
    assert cached == [0] * 4
    for _ in range(2):
        assert run(llm) == (expected, [HIT] * 4)
    found = counts(llm)
    assert found.fetched > 0 and found.read > 0 and found.lost == 0
    stop(llm)
    assert len({file.parent.parent for file in tmp_path.glob("*/lane-*/*.kv")}) == 2


def test_a_served_prompt_is_found_after_the_engine_was_killed(hybrid, tmp_path: Path):
    case = hybrid("bamba")
    server = Running(case.directory, **settings(case, **on_disk(tmp_path), kv_offloading_size=0.01))
    try:
        body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "logprobs": 1, "return_token_ids": True}
        first = server.http.post("/v1/completions", json=body).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wait_for(lambda: server.llm.stats.tier.on_disk >= HIT // PAGE + 1)
        [engine] = server.llm.engines
        os.kill(engine.pid, signal.SIGKILL)
        wait_for(lambda: engine.restarts == 1 and engine.state == "ready")
        second = server.http.post("/v1/completions", json=body).json()
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == HIT
        for name in ("token_ids", "logprobs"):
            assert second["choices"][0][name] == first["choices"][0][name]
    finally:
        server.close()


def test_the_plan_counts_pages_and_snapshots_in_host_memory(hybrid):
    sizes = {"kv_offloading_size": 2**20 / 2**30, "block_size": PAGE, "device": "cpu", "dtype": "float32"}
    text = [
        render(make_plan(EngineArgs(model=str(hybrid(family).directory), **sizes), 1 << 30)) for family in ("bamba", "mamba")
    ]
    assert "1.00 MiB for 2,048 evicted pages, or snapshots of the memory of 18 pages each" in text[0]
    assert "1.00 MiB for 82 evicted snapshots" in text[1]


def test_host_memory_that_cannot_hold_a_page_and_a_snapshot_is_refused(hybrid):
    with pytest.raises(ConfigError, match=r"gives each rank \d+ bytes, less than one page of 512 and one snapshot of"):
        start(hybrid("bamba"), kv_offloading_size=2000 / 2**30)
