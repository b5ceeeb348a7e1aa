"""Adapters through AsyncLLM and LLM, on engines without a model."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from async_support import collect, open_async, run, until

from adapter_files import write_adapter
from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.types.errors import AdapterError, InvalidParameter, NotSupported
from quire.types.prompts import Prompt

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
SOME = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
TEXT = "the quick brown fox"

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def adapters(tmp_path):
    return {name: LoRARequest(name, i, str(write_adapter(tmp_path / name, name))) for i, name in enumerate("abc", start=1)}


async def ask(llm, name, lora=None, params=PARAMS, prompt=TEXT):
    return (await collect(llm, prompt, params, name, lora_request=lora))[-1]


def test_offline_one_adapter_or_one_for_each(tiny_model, adapters):
    a, b, _ = adapters.values()
    llm = LLM(str(tiny_model), device="cpu", distributed_executor_backend="fake", enable_lora=True, block_size=4)

    def tokens(lora, prompts=TEXT):
        return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=lora)]

    [plain], [first], [second] = tokens(None), tokens(a), tokens(b)
    assert len({tuple(plain), tuple(first), tuple(second)}) == 3
    assert tokens([b, None, a, b], [TEXT] * 4) == [second, plain, first, second]  # with one place
    [output] = llm.generate(TEXT, PARAMS, use_tqdm=False, lora_request=a)
    assert output.lora_request == a and output.outputs[0].lora_request.lora_path == a.lora_path
    many = SamplingParams(n=3, temperature=1, seed=5, max_tokens=12, ignore_eos=True)
    [alone], [with_a] = llm.generate(TEXT, many, use_tqdm=False), llm.generate(TEXT, many, use_tqdm=False, lora_request=a)
    assert [one.token_ids for one in alone.outputs] != [one.token_ids for one in with_a.outputs]
    beams = BeamSearchParams(beam_width=2, max_tokens=3)
    found = llm.beam_search([TEXT, TEXT], beams, lora_request=[a, None])
    assert found[0].sequences[0].tokens != found[1].sequences[0].tokens
    assert found[0].sequences[0].tokens == llm.beam_search([TEXT], beams, lora_request=a)[0].sequences[0].tokens
    engine = llm.llm_engine
    assert engine.list_loras() == {1, 2} and engine.pin_lora(2) and not engine.pin_lora(9)
    with pytest.raises(AdapterError, match="all 1 slots have pinned"):
        llm.llm_engine.pin_lora(1)
    assert engine.remove_lora(2) and not engine.remove_lora(2) and engine.list_loras() == {1}
    assert engine.add_lora(adapters["c"]) and engine.list_loras() == {1, 3}
    with pytest.raises(AdapterError, match=r"r must be an integer"):
        llm.generate(TEXT, PARAMS, lora_request=LoRARequest("bad", 4, str(write_adapter(folder_of(a) / "bad", "x", rank=-1))))
    assert engine.list_loras() == {1, 3}
    engine.core.step()
    engine.core.adapters.check()
    engine.core.scheduler.roster.check()
    engine.shutdown()


def folder_of(lora):
    return Path(lora.lora_path).parent


def test_an_engine_without_adapters_says_so(tiny_model, adapters):
    llm = open_async(tiny_model)

    async def scene():
        with pytest.raises(NotSupported, match="enable_lora"):
            await ask(llm, "r", adapters["a"])
        with pytest.raises(NotSupported, match="enable_lora"):
            await llm.add_lora(adapters["a"])
        assert await llm.list_loras() == set() and not await llm.remove_lora(1)

    run(scene(), llm)


def test_updates_and_unloading_while_requests_run(tiny_model, adapters):
    llm = open_async(tiny_model, enable_lora=True, max_loras=2, max_cpu_loras=2)
    a, b, c = adapters.values()

    async def scene():
        one, two, three = [(await ask(llm, f"{i}", lora)).outputs[0].token_ids for i, lora in enumerate((a, b, None))]
        assert len({tuple(one), tuple(two), tuple(three)}) == 3
        whole = (await ask(llm, "whole", a, LONG)).outputs[0].token_ids
        running = asyncio.create_task(ask(llm, "long", a, LONG))
        await until(lambda: llm.adapters_in_use()[2] == ["a"])
        write_adapter(folder_of(a) / "a", "another")
        assert (await ask(llm, "same", a)).outputs[0].token_ids == one  # nobody said that it is to be loaded again
        newer = LoRARequest("a", 1, a.lora_path, load_inplace=True)
        fresh = (await ask(llm, "new", newer)).outputs[0].token_ids
        assert fresh not in (one, two, three)
        assert (await ask(llm, "new name", a)).outputs[0].token_ids == fresh
        assert (await running).outputs[0].token_ids == whole
        running = asyncio.create_task(ask(llm, "long", b, LONG))
        await until(lambda: llm.adapters_in_use()[2] == ["b"])
        assert await llm.remove_lora(2) and await llm.list_loras() == {1}
        assert len((await running).outputs[0].token_ids) == 120
        write_adapter(folder_of(a) / "a", "bad", rank=0)
        with pytest.raises(AdapterError, match=r"r must be an integer"):
            await llm.add_lora(newer)
        assert (await ask(llm, "still", a)).outputs[0].token_ids == fresh
        with pytest.raises(InvalidParameter, match="lora_int_id 1 is the adapter 'a'"):
            await ask(llm, "taken", LoRARequest("c", 1, c.lora_path))

    run(scene(), llm)


def test_who_changes_a_name_waits_for_who_does_so_already(tiny_model, adapters, monkeypatch):
    llm = open_async(tiny_model, enable_lora=True, max_loras=2, max_cpu_loras=3)
    a, b, c = adapters.values()
    looks, look = [], llm.adapters.resolve
    monkeypatch.setattr(llm.adapters, "resolve", lambda lora, *how: (looks.append(lora.lora_name), look(lora, *how))[1])

    async def scene():
        one, two = [(await ask(llm, f"{i}", lora)).outputs[0].token_ids for i, lora in enumerate((a, b))]
        # two of the same name, with other content
        rivals = [LoRARequest("x", 7, a.lora_path), LoRARequest("x", 8, b.lora_path)]
        told = await asyncio.gather(*map(llm.add_lora, rivals), return_exceptions=True)
        assert told[0] is True and isinstance(told[1], InvalidParameter) and "from another path" in str(told[1])
        assert (await ask(llm, "x", rivals[0])).outputs[0].token_ids == one and await llm.list_loras() == {1, 2, 7}
        # replaced, and removed while it is
        newer = LoRARequest("x", 9, b.lora_path, load_inplace=True)
        assert await asyncio.gather(llm.add_lora(newer), llm.remove_lora(7), llm.pin_lora(7)) == [True, True, False]
        assert await llm.list_loras() == {1, 2} and llm.adapters.find("x") is None
        # replaced twice, by whoever came later
        changes = [LoRARequest("x", 9, each.lora_path, load_inplace=True) for each in (b, a, b)]
        assert await asyncio.gather(*map(llm.add_lora, changes)) == [True] * 3
        assert (await ask(llm, "y", LoRARequest("x", 9, b.lora_path))).outputs[0].token_ids == two
        # asked for by many, and loaded once
        looks.clear()
        outputs = await asyncio.gather(*(ask(llm, f"many {i}", c) for i in range(5)))
        assert looks == ["c"] and len({tuple(each.outputs[0].token_ids) for each in outputs}) == 1
        # the engine is lost while it reads one
        late = LoRARequest("late", 20, str(write_adapter(folder_of(a) / "late", "late")))
        os.kill(llm.engine_pid, signal.SIGSTOP)
        loading = asyncio.create_task(llm.add_lora(late))
        await until(lambda: llm._client._calls)
        os.kill(llm.engine_pid, signal.SIGKILL)
        assert await loading and (await ask(llm, "late", late)).outputs[0].token_ids not in (one, two)

    run(scene(), llm)


def test_a_lost_engine_costs_no_stream_its_adapter(tiny_model, adapters, monkeypatch):
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.01")
    llm = open_async(tiny_model, enable_lora=True, max_loras=2)
    a, b, c = adapters.values()

    async def scene():
        loras = [a, b, c, None, a]
        expected = [(await ask(llm, f"x{i}", lora, SOME)).outputs[0].token_ids for i, lora in enumerate(loras)]
        assert await llm.pin_lora(2)
        tasks = [asyncio.create_task(ask(llm, f"y{i}", lora, SOME)) for i, lora in enumerate(loras)]
        begun = llm._client._open.values()
        await until(lambda: len(llm.adapters_in_use()[2]) == 2 and sum(bool(entry.reported) for entry in begun) >= 3)
        os.kill(llm.engine_pid, signal.SIGKILL)
        outputs = await asyncio.gather(*tasks)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.restarts == 1 and llm.replayed >= 3
        assert await llm.list_loras() == {1, 2, 3}

    run(scene(), llm)


def test_who_has_not_begun_gets_the_version_that_is_there(tiny_model, adapters, monkeypatch):
    monkeypatch.setenv("QUIRE_FAKE_LATENCY", "0.04")
    llm = open_async(tiny_model, enable_lora=True)  # there is one place, and room for one
    a, b, _ = adapters.values()
    few, two = SamplingParams(max_tokens=2), SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True)

    async def scene():
        await ask(llm, "a", a, few)
        old = llm.adapters.find("a").extras
        running = asyncio.create_task(ask(llm, "b", b, LONG))
        await until(lambda: llm.adapters_in_use()[2] == ["b"])
        waiting = asyncio.create_task(ask(llm, "waits", a, two))
        await until(lambda: llm.adapters_in_use()[1] == ["a"])
        write_adapter(folder_of(a) / "a", "replaced")
        await llm.add_lora(LoRARequest("a", 1, a.lora_path, load_inplace=True))
        assert not running.done()  # so the old version has not been read again
        running.cancel()
        late, now = await waiting, await ask(llm, "new", a, two)
        assert [one.token_ids for one in late.outputs] == [one.token_ids for one in now.outputs]
        await llm.remove_lora(1)
        with pytest.raises(AdapterError, match="have changed since"):
            await ask(llm, "gone", prompt=Prompt(None, [5, 6, 7], extras=old))

    run(scene(), llm)
