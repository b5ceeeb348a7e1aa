"""Pages on disk through the front door: the next engine finds them, and no fault of the disk changes a token."""

import logging
import os
import shutil
import signal
from array import array
from pathlib import Path
from threading import Event

import pytest
from test_host_tier import CONVERSATIONS, GREEDY, SMALL, TIER, counts, turns

from patience import wait_for
from quire import LLM, SamplingParams
from quire.cache.prefix import extend_keys
from quire.types.errors import ConfigError
from serving import NAME, Running
from tiny_model import make_model


def start(model: str, path: Path, **args) -> LLM:
    return LLM(model, **{**SMALL, **TIER, "kv_disk_path": str(path), "kv_disk_size": 0.01, **args})


def stop(llm: LLM) -> None:
    llm.llm_engine.core.scheduler.roster.check()
    llm.llm_engine.shutdown()


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/lane-*/*.kv"))


def test_the_next_engine_finds_prompts_and_answers_of_the_last(model: str, expected: list, tmp_path: Path):
    first = start(model, tmp_path)
    assert turns(first) == expected
    stop(first)
    second = start(model, tmp_path)
    assert counts(second).on_disk > 0
    assert turns(second) == expected
    found = counts(second)
    assert found.read > 0 and found.hits > 0 and found.lost == 0
    prompt = {"prompt_token_ids": CONVERSATIONS[0]}
    assert second.reset_prefix_cache()
    assert counts(second).on_disk == counts(second).used == 0 and not files(tmp_path)
    [output] = second.generate([prompt], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected[0][0] and output.num_cached_tokens == 0
    stop(second)


def test_a_prompt_that_was_never_evicted_is_on_disk(model: str, tmp_path: Path):
    prompt = {"prompt_token_ids": list(range(3, 40))}
    cached = []
    for _ in range(2):
        llm = start(model, tmp_path)
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        cached.append(output.num_cached_tokens)
        stop(llm)
    assert cached == [0, 36]


def test_every_rank_has_its_share_in_memory_and_on_disk(model: str, expected: list, tmp_path: Path):
    llm = start(model, tmp_path, tensor_parallel_size=2)
    assert turns(llm) == expected
    found = counts(llm)
    assert found.fetched > 0 and found.written > 0 and found.lost == 0
    stop(llm)
    assert len({file.parent.parent for file in files(tmp_path)}) == 2


def test_another_model_version_dtype_or_page_size_finds_nothing(
    model: str, tmp_path: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    llm = start(model, tmp_path)
    turns(llm, 1)
    stop(llm)
    assert "which are ignored" not in caplog.text
    other = str(make_model(tmp_path_factory.mktemp("other"), hidden_size=64))
    for directory, args in ((other, {}), (model, {"block_size": 8}), (model, {"kv_cache_dtype": "fp8"})):
        llm = start(directory, tmp_path, **args)
        assert counts(llm).on_disk == 0
        stop(llm)
    with monkeypatch.context() as version:
        version.setattr("quire.features.tiers.host.__version__", "0")
        caplog.clear()
        llm = start(model, tmp_path)
        assert counts(llm).on_disk == 0 and caplog.text.count("which are ignored") == 1
        stop(llm)
    llm = start(model, tmp_path)
    assert counts(llm).on_disk > 0
    stop(llm)


def test_a_tenant_finds_nothing_of_another_in_memory_or_on_disk(model: str, tmp_path: Path):
    def ask(llm: LLM, tenant: str) -> int:
        prompt = {"prompt_token_ids": CONVERSATIONS[0], "cache_salt": tenant}
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        while llm.llm_engine.core.has_unfinished:
            llm.llm_engine.core.step()
        return output.num_cached_tokens

    llm = start(model, tmp_path)
    assert [ask(llm, tenant) for tenant in ("first", "second", "first")] == [0, 0, 36]
    stop(llm)
    llm = start(model, tmp_path)
    assert counts(llm).on_disk == 2 * 11, "11 full pages of each tenant, under different names"
    assert [ask(llm, tenant) for tenant in ("third", "second", "first")] == [0, 36, 36]
    stop(llm)


def test_a_path_on_a_full_disk_or_of_another_user_is_refused_at_the_start(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("quire.features.tiers.disk.os.write", full)
        with pytest.raises(ConfigError, match=r"cannot be used: No space left on device. Give a directory .* with space"):
            start(model, tmp_path / "full")
    with monkeypatch.context() as user:
        user.setattr("quire.features.tiers.disk.os.geteuid", lambda: 12345)
        with pytest.raises(ConfigError, match=r"kv_disk_path: .* belongs to user \d+, who could read or replace pages"):
            start(model, tmp_path / "theirs")


def test_no_request_waits_for_a_disk_that_hangs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first one is aborted while it waits. Another with the same prompt does not wait for its read again and again."""
    monkeypatch.setattr("quire.sched.disk.READ_TIMEOUT_S", 0.05)
    llm = start(model, tmp_path)
    prompts = [{"prompt_token_ids": CONVERSATIONS[0]}]
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    stop(llm)
    llm = start(model, tmp_path)
    part, hung = next(part for part in llm.llm_engine.core.executor._runner._parts if part.name == "tiers"), Event()
    get = part._disk.store.get
    monkeypatch.setattr(part._disk.store, "get", lambda *args: hung.wait() and get(*args))
    llm.llm_engine.add_request("first", prompts[0], GREEDY)
    llm.llm_engine.step()
    llm.llm_engine.abort_request("first")
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    hung.set()
    stop(llm)


def test_an_engine_beside_another_has_a_lane_of_its_own(model: str, expected: list, tmp_path: Path):
    first, second = start(model, tmp_path), start(model, tmp_path)
    assert turns(first, 1) == turns(second, 1) == expected[:1]
    assert {file.parent.name for file in files(tmp_path)} == {"lane-0", "lane-1"}
    stop(first)
    stop(second)


def test_a_full_disk_is_logged_once_and_serving_goes_on(
    model: str, expected: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quire.features.tiers.disk.os.pwritev", full)
    with caplog.at_level(logging.WARNING):
        llm = start(model, tmp_path)
        assert turns(llm) == expected
    assert counts(llm).written == 0 and caplog.text.count("No space left") == 1
    stop(llm)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kv_offloading_size": 0}, "kv_disk_path requires kv_offloading_size"),
        ({"kv_disk_path": "/proc/nothing"}, "kv_disk_path /proc/nothing cannot be used: .*Give a directory that"),
        ({"kv_disk_size": 0}, "kv_disk_size must be above 0"),
        ({"kv_disk_size": 1e-9}, "kv_disk_size gives each rank 1 bytes, less than one record of .*Raise it"),
        ({"kv_disk_size": 1e30}, "kv_disk_size gives each rank .* more than the .* GiB of the file system of .*Lower it"),
        ({"enable_prefix_caching": False}, "requires enable_prefix_caching"),
    ],
)
def test_bad_input_is_named_at_the_start(model: str, tmp_path: Path, args: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        start(model, tmp_path, **{"preemption_mode": "auto", **args})


def test_a_served_prompt_is_found_after_the_engine_was_killed(model: str, tmp_path: Path):
    """Requests go on, and the engine that replaces the killed one has the disk of the first. If the directory was deleted,
    engines serve without it, and the next one makes it again."""
    server = Running(Path(model), **{**SMALL, **TIER, "kv_disk_path": str(tmp_path), "kv_cache_memory_bytes": None})
    try:
        body = {"model": NAME, "prompt": list(range(3, 43)), "max_tokens": 4, "temperature": 0}
        first = server.http.post("/v1/completions", json=body).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wait_for(lambda: sum(file.stat().st_size for file in files(tmp_path)) >= 10 * 1024)
        [engine] = server.llm.engines
        os.kill(engine.pid, signal.SIGKILL)
        wait_for(lambda: engine.restarts == 1 and engine.state == "ready")
        second = server.http.post("/v1/completions", json=body).json()
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 36
        assert server.llm.stats.tier.hits == 36
        shutil.rmtree(tmp_path)
        tenant = server.http.post("/v1/completions", json={**body, "cache_salt": "another"}).json()
        assert tenant["choices"] == first["choices"] and tenant["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        os.kill(engine.pid, signal.SIGKILL)
        wait_for(lambda: engine.restarts == 2 and engine.state == "ready")
        assert server.http.post("/v1/completions", json=body).json()["choices"] == first["choices"]
    finally:
        server.close()


def test_pages_of_a_broken_row_are_removed_from_disk(model: str, tmp_path: Path):
    llm = start(model, tmp_path)
    llm.generate([{"prompt_token_ids": text} for text in CONVERSATIONS[:2]], GREEDY, use_tqdm=False)
    stop(llm)
    llm = start(model, tmp_path)
    core, before = llm.llm_engine.core, counts(llm).on_disk
    keys: list[bytes] = []
    extend_keys(keys, array("i", CONVERSATIONS[0]), SMALL["block_size"], ())
    core.scheduler.tier.forget([(0, key) for key in keys])
    while core.has_unfinished:
        core.step()
    assert counts(llm).on_disk == before - len(keys)
    stop(llm)
    llm = start(model, tmp_path)
    assert counts(llm).on_disk == before - len(keys)
    stop(llm)


def test_one_hit_has_pages_of_the_device_of_host_memory_and_of_the_disk(model: str, tmp_path: Path):
    params = SamplingParams(temperature=0.0, max_tokens=1)
    text, other = [(j * 3) % 50 + 3 for j in range(61)], [(j * 5) % 40 + 60 for j in range(95)]

    def ask(llm: LLM, tokens: list[int]) -> tuple[int, list[int]]:
        [output] = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        while llm.llm_engine.core.has_unfinished:
            llm.llm_engine.core.step()
        return output.num_cached_tokens, list(output.outputs[0].token_ids)

    first = start(model, tmp_path)
    answer = ask(first, text)[1]
    stop(first)
    llm = start(model, tmp_path)
    assert ask(llm, text[:41])[0] == 40, "from disk, through host memory"
    assert ask(llm, other)[0] == 0, "it evicts some of them from the device"
    before = counts(llm)
    assert ask(llm, text) == (60, answer)
    found = counts(llm)
    hits, from_disk = found.hits - before.hits, found.disk_hits - before.disk_hits
    assert from_disk == 20 and 0 < hits - from_disk < 40, (hits, from_disk)
    stop(llm)
