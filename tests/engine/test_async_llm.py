"""AsyncLLM: the engine in another process, answers as async generators."""

import asyncio
import subprocess
import sys
import time

import pytest
from async_support import collect, open_async, run, until
from tiny import TEXT, open_model

from quire import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, EngineArgs, RequestOutputKind, SamplingParams
from quire.sampling_params import StructuredOutputsParams
from quire.text.detokenizer import ByteDetokenizer
from quire.types.errors import ConfigError, EngineDead, InvalidParameter, PromptTooLong, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DELTA = RequestOutputKind.DELTA
pytestmark = pytest.mark.usefixtures("quick")
leaves_nothing = pytest.mark.usefixtures("traces")


def answer(outputs):
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1].outputs[0]


@leaves_nothing
def test_it_answers_like_the_engine_in_this_process(tiny_model):
    seeded = SamplingParams(temperature=1.1, top_p=0.9, seed=11, max_tokens=20, n=2, logprobs=2, prompt_logprobs=1)
    offline = open_model(tiny_model)
    llm = open_async(tiny_model, backend="uni")

    async def scene():
        await llm.wait_ready()
        assert llm.state == "ready" and (llm.config.device, llm.config.dtype) == ("cpu", "float32")
        return await asyncio.gather(*(collect(llm, text, p, f"{text} {p.n}") for text in TEXT for p in (GREEDY, seeded)))

    found = [outputs[-1] for outputs in run(scene(), llm)]
    expected = [offline.generate(text, p, use_tqdm=False)[0] for text in TEXT for p in (GREEDY, seeded)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.prompt, ours.prompt_token_ids) == (theirs.prompt, theirs.prompt_token_ids)
        assert len(ours.outputs) == len(theirs.outputs)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
            assert [set(table) for table in one.logprobs or ()] == [set(table) for table in other.logprobs or ()]
        assert [t and set(t) for t in ours.prompt_logprobs or ()] == [t and set(t) for t in theirs.prompt_logprobs or ()]


@pytest.mark.parametrize("n", [1, 3])
def test_a_slow_listener_loses_nothing(crew, n):
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "n": n, "logprobs": 1, "ignore_eos": True}

    async def scene():
        [*_, whole] = await collect(crew.llm, TEXT[0], SamplingParams(**params), "whole")
        told = [["", [], []] for _ in range(n)]
        outputs = 0
        async for output in crew.llm.generate(TEXT[0], SamplingParams(**params, output_kind=DELTA), "slow"):
            outputs += 1
            for choice in output.outputs:
                told[choice.index][0] += choice.text
                told[choice.index][1] += choice.token_ids
                told[choice.index][2] += choice.logprobs
            while outputs == 2 and (crew.llm.stats is None or crew.llm.stats.running):
                await asyncio.sleep(0.01)  # the engine goes on meanwhile
        assert told == [[c.text, c.token_ids, c.logprobs] for c in whole.outputs]
        assert outputs < 6

    crew(scene())


def test_final_only_and_stream_interval(crew):
    async def scene():
        final = SamplingParams(max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        assert [len(o.outputs[0].token_ids) for o in await collect(crew.llm, [1, 2], final, "a")] == [9]
        steps = [o async for o in crew.llm.generate([1, 2], SamplingParams(max_tokens=9, stream_interval=4), "b")]
        assert len(steps[0].outputs[0].token_ids) < 9 and len(steps) <= 4

    crew(scene())


@pytest.mark.parametrize(
    ("prompt", "params", "error", "parameter"),
    [
        ("", GREEDY, InvalidParameter, "prompt"),
        ([1] * 300, GREEDY, PromptTooLong, "prompt"),
        ([99999], GREEDY, InvalidParameter, "prompt"),
        ("x", SamplingParams(logprobs=99), InvalidParameter, "logprobs"),
        ("x", None, InvalidParameter, "sampling_params"),
    ],
)
def test_a_bad_request_is_refused_before_the_first_output(crew, prompt, params, error, parameter):
    async def scene():
        with pytest.raises(error) as caught:
            await collect(crew.llm, prompt, params, "bad")
        assert caught.value.parameter == parameter

    crew(scene())


@leaves_nothing
def test_what_only_the_engine_can_refuse(tiny_model):
    llm = open_async(tiny_model, num_gpu_blocks_override=50, max_model_len=100, long_prefill_token_threshold=4)

    async def scene():
        await llm.wait_ready()
        llm.prompts.max_model_len = 5000
        for n in (1, 3):
            with pytest.raises(PromptTooLong, match="has 120 tokens and may have 100") as caught:
                await collect(llm, [1] * 120, SamplingParams(n=n), "long")
            assert caught.value.parameter == "prompt" and llm.num_open == llm._client.num_open == 0
        assert answer(await collect(llm, [1], GREEDY, "short")).finish_reason == "length"

    run(scene(), llm)


def test_an_id_in_use_is_refused_and_free_again_afterwards(crew):
    async def scene():
        first = crew.llm.generate([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True), "same")
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await collect(crew.llm, [1], GREEDY, "same")
        assert crew.llm.num_open == 1
        await first.aclose()
        again = [o async for o in crew.llm.generate([1, 2, 3], GREEDY, "same")]  # the engine has still to hear of the abort
        assert answer(again).finish_reason == "length" and len(answer(again).token_ids) == 12

    crew(scene())


@pytest.mark.parametrize("way", ["close", "cancel"])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_leaving_ends_the_request_in_the_engine(crew, way, steps):
    llm, params = crew.llm, SamplingParams(max_tokens=200, ignore_eos=True, n=2)

    async def listen():
        stream = llm.generate(TEXT[1], params, "gone")
        for _ in range(steps):
            await anext(stream)
        if way == "close":
            await stream.aclose()
        else:
            async for _ in stream:
                pass

    async def scene():
        task = asyncio.create_task(listen())
        if way == "cancel":
            await until(lambda: llm.num_open == 1)
            await asyncio.sleep(steps * 0.005)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert llm.num_open == 0
        left = time.monotonic()
        beside = llm.generate([1, 2], SamplingParams(max_tokens=200, ignore_eos=True), "stays")
        running = [(llm.stats.running, len(output.outputs[0].token_ids)) async for output in beside]
        assert {count for count, tokens in running if tokens > 10} == {1}, "two more would run beside it"
        assert time.monotonic() - left > 0.2

    crew(scene())


def test_abort_is_told_to_whoever_listens(crew):
    llm = crew.llm

    async def scene():
        stream = llm.generate(TEXT[1], SamplingParams(max_tokens=200, ignore_eos=True, output_kind=DELTA), "a")
        tokens = len((await anext(stream)).outputs[0].token_ids)
        await llm.abort(["a", "unknown"])
        rest = [output async for output in stream]
        assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "abort"
        assert tokens + sum(len(output.outputs[0].token_ids) for output in rest) < 200
        await llm.abort("a")

    crew(scene())


def test_stop_strings_end_the_request_in_the_engine(crew):
    async def scene():
        whole = answer(await collect(crew.llm, TEXT[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), "w"))
        stop = whole.text[10:13]
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[stop])
        cut = answer(await collect(crew.llm, TEXT[0], params, "c"))
        assert cut.text == whole.text[: whole.text.index(stop)] and cut.stop_reason == stop

    crew(scene())


def test_a_request_whose_text_cannot_be_made_fails_alone(crew, monkeypatch, caplog):
    good, bad = (SamplingParams(max_tokens=30, seed=seed, ignore_eos=True) for seed in (1, 2))

    async def both():
        pair = await asyncio.gather(collect(crew.llm, TEXT[0], good, "good"), collect(crew.llm, TEXT[0], bad, "bad"))
        return [answer(outputs) for outputs in pair]

    before = crew(both())
    unreadable = next(i for i in before[1].token_ids[5:] if i not in before[0].token_ids + before[1].token_ids[:5])
    feed = ByteDetokenizer.feed
    monkeypatch.setattr(ByteDetokenizer, "feed", lambda self, ids: 1 / 0 if unreadable in ids else feed(self, ids))
    after = crew(both())
    assert (after[0].text, after[0].finish_reason) == (before[0].text, "length")
    assert (after[1].finish_reason, after[1].error) == ("error", "ZeroDivisionError: division by zero")
    assert before[1].text.startswith(after[1].text)
    assert len(caplog.records) == 1


def test_text_helpers(crew):
    llm = crew.llm

    async def scene():
        ids = await llm.tokenize(TEXT[0])
        assert ids == llm.tokenizer.encode(TEXT[0]) and await llm.decode(ids) == TEXT[0]
        messages = [{"role": "user", "content": "hi"}]
        text, ids = await llm.render_chat(messages, add_generation_prompt=True)
        assert text == "<user>hi</s><assistant>" and ids == llm.tokenizer.encode(text, add_special_tokens=False)
        with pytest.raises(RequestError):
            await llm.tokenize("\ud800")

    crew(scene())


def test_prefix_cache_tenants_and_reset(crew):
    llm, prompt = crew.llm, list(range(40))

    async def cached(name, **more):
        return (await collect(llm, prompt, GREEDY, name, **more))[-1].num_cached_tokens

    async def scene():
        assert await llm.reset_prefix_cache() is True
        assert (await cached("a"), await cached("b")) == (0, 36)
        assert (await cached("c", cache_tenant="x"), await cached("d", cache_tenant="x")) == (0, 36)
        assert await cached("e", cache_tenant="y") == 0
        assert await llm.reset_prefix_cache() is True
        assert await cached("f", cache_tenant="x") == 0
        running = llm.generate([1, 2], SamplingParams(max_tokens=200, ignore_eos=True), "runs")
        await anext(running)
        assert await llm.reset_prefix_cache() is False
        await running.aclose()

    crew(scene())


def test_observers_hear_of_everything(crew):
    class Witness:
        def __init__(self):
            self.tokens, self.arrived, self.finished, self.generated = 0, [], [], 0

        def on_step(self, stats, tokens_in_step, now):
            self.tokens += tokens_in_step
            assert stats.pages == crew.llm.pages and now > 0

        def on_arrival(self, request):
            self.arrived.append(request.request_id)

        def on_outputs(self, news):
            self.generated += news.tokens
            self.finished += news.finished

    witness = Witness()

    async def scene():
        await crew.llm.reset_prefix_cache()
        crew.llm.observers.append(witness)
        await collect(crew.llm, [1, 2, 3, 4, 5], GREEDY, "seen", trace_headers={"traceparent": "x"})
        await until(lambda: witness.tokens >= 16)
        crew.llm.observers.remove(witness)

    crew(scene())
    assert witness.tokens == 5 + 11  # the last token is never run
    assert (witness.arrived, witness.generated) == (["seen"], 12)
    assert witness.finished[0].trace_headers == {"traceparent": "x"}


def test_an_observer_that_fails_harms_nobody(crew, caplog):
    class Broken:
        def on_arrival(self, request):
            pass

        def on_step(self, stats, tokens_in_step, now):
            raise RuntimeError("on order")

        on_outputs = on_arrival

    class Worse(Broken):
        def on_arrival(self, request):
            raise RuntimeError("on order")

        on_outputs = on_arrival

    crew.llm.observers += [Broken(), Worse()]
    try:
        assert answer(crew(collect(crew.llm, TEXT[0], GREEDY, "x"))).finish_reason == "length"
    finally:
        crew.llm.observers.clear()
    assert {record.message for record in caplog.records} == {"an observer failed"}


def test_a_request_that_nobody_can_listen_to_is_not_run(crew, monkeypatch):
    """Whether it was sent already or not."""

    def broken(*_):
        raise RuntimeError("on order")

    for at_once in (True, False):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="on order"):
            patch.setattr(crew.llm._outputs, "add", broken)
            crew(collect(crew.llm, TEXT[0], GREEDY, "x", at_once=at_once))
        assert crew.llm._client.num_open == 0
    assert answer(crew(collect(crew.llm, TEXT[0], GREEDY, "x"))).finish_reason == "length"


def test_a_priority_that_cannot_be_sent_is_refused(crew):
    with pytest.raises(RequestError, match="priority must be between"):
        crew(collect(crew.llm, TEXT[0], GREEDY, "x", priority=1 << 70, at_once=True))
    assert crew.llm._client.num_open == 0


@leaves_nothing
def test_two_engines_in_one_process(tiny_model):
    one, two = open_async(tiny_model), open_async(tiny_model)

    async def scene():
        await asyncio.gather(one.wait_ready(), two.wait_ready())
        assert one.engine_pid != two.engine_pid
        texts = await asyncio.gather(*(collect(llm, TEXT[0], GREEDY, "x") for llm in (one, two)))
        assert answer(texts[0]).text == answer(texts[1]).text
        one.shutdown()
        assert answer(await collect(two, TEXT[0], GREEDY, "x")).text == answer(texts[0]).text
        two.shutdown()

    run(scene())


@leaves_nothing
def test_one_engine_on_two_event_loops(tiny_model):
    llm = open_async(tiny_model)
    texts = [answer(asyncio.run(collect(llm, TEXT[0], GREEDY, "x"))).text for _ in range(2)]
    assert texts[0] == texts[1]
    llm.shutdown()


def test_uvloop(tiny_model, request):
    uvloop = pytest.importorskip("uvloop")
    uvloop.run(asyncio.sleep(0))  # it keeps a pipe for signals
    request.getfixturevalue("traces")
    llm = open_async(tiny_model)

    async def scene():
        outputs = await asyncio.gather(*(collect(llm, TEXT[0], GREEDY, f"{i}") for i in range(20)))
        llm.shutdown()
        return {answer(output).text for output in outputs}

    assert len(uvloop.run(scene())) == 1


@leaves_nothing
def test_shutdown_ends_open_requests(tiny_model):
    llm = open_async(tiny_model)

    async def scene():
        stream = llm.generate(TEXT[1], SamplingParams(max_tokens=200, ignore_eos=True), "open")
        await anext(stream)
        llm.shutdown()
        assert llm.state == "dead" and llm.engine_pid is None
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDead, match="shut down"):
            await collect(llm, "x", GREEDY, "late")
        with pytest.raises(EngineDead, match="shut down"):
            await llm.check_health()
        with pytest.raises(EngineDead, match="shut down"):
            await llm.wait_ready()
        with pytest.raises(EngineDead, match="shut down"):
            await llm.reset_prefix_cache()
        llm.shutdown()

    run(scene())


@leaves_nothing
def test_shutdown_before_anything_happened(tiny_model):
    llm = open_async(tiny_model)
    assert llm.state == "starting"
    llm.shutdown()


@leaves_nothing
def test_without_a_tokenizer(tiny_model):
    llm = open_async(tiny_model, skip_tokenizer_init=True)

    async def scene():
        outputs = await collect(llm, [5, 6], GREEDY, "ids")
        assert answer(outputs).text == "" and len(answer(outputs).token_ids) == 12
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            await collect(llm, "text", GREEDY, "text")
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            await llm.tokenize("text")

    run(scene(), llm)


def test_the_fake_executor_serves_the_offline_api_too(tiny_model):
    llm = open_model(tiny_model, distributed_executor_backend="fake", load_format="auto")
    before, after = (llm.generate(TEXT, GREEDY, use_tqdm=False) for _ in range(2))
    assert [output.outputs[0].token_ids for output in before] == [output.outputs[0].token_ids for output in after]
    with pytest.raises(ConfigError, match="must be one of auto, mp, ray, external_launcher, uni, fake"):
        open_model(tiny_model, distributed_executor_backend="none")


def test_the_names_of_vllm():
    assert AsyncLLMEngine is AsyncLLM and AsyncEngineArgs is EngineArgs


def test_this_process_does_not_need_torch():
    code = "import sys, quire.async_llm, quire.engine.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_requests_that_come_together_are_sent_together(crew, monkeypatch):
    llm = crew.llm
    sent, add = [], llm._client.add

    def note(requests):
        sent.append(len(list(requests)))
        add(requests)

    monkeypatch.setattr(llm._client, "add", note)

    async def scene():
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=1)
        answers = await asyncio.gather(*[collect(llm, [7, i + 2, 5], params, f"together-{i}") for i in range(20)])
        alone = await collect(llm, [7, 2, 5], params, "alone")
        return answers, alone

    answers, alone = crew(scene())
    assert sent == [20, 1]
    assert answer(answers[0]).token_ids == answer(alone).token_ids
    assert len({tuple(answer(one).token_ids) for one in answers}) > 1


def test_a_request_can_be_sent_at_once(crew, monkeypatch):
    """Others that come with it go after it, and it can be left like any other."""
    llm = crew.llm
    sent, add = [], llm._client.add

    def note(requests):
        sent.append((len(list(requests)), llm.num_open))
        add(requests)

    monkeypatch.setattr(llm._client, "add", note)

    async def scene():
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        first = collect(llm, [7, 2, 5], params, "first", at_once=True)
        others = [collect(llm, [7, 2, 5], params, f"other-{i}") for i in range(3)]
        answers = await asyncio.gather(first, *others)
        stream = llm.generate([1, 2], SamplingParams(max_tokens=500, ignore_eos=True), "left", at_once=True)
        await anext(stream)
        await stream.aclose()
        return answers

    answers = crew(scene())
    assert sent == [(1, 0), (3, 4), (1, 0)]
    assert len({tuple(answer(one).token_ids) for one in answers}) == 1
    assert llm.num_open == 0


def test_a_request_that_is_left_before_it_was_sent_never_goes(crew, monkeypatch):
    llm = crew.llm
    sent, add = [], llm._client.add

    def note(requests):
        sent.extend(requests)
        add(requests)

    monkeypatch.setattr(llm._client, "add", note)

    async def scene():
        stream = llm.generate([3, 4], GREEDY, "left")
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # it has been opened, and is to be sent next
        assert llm.num_open == 1
        first.cancel()
        llm._close("left", llm._streams["left"])
        await asyncio.gather(first, return_exceptions=True)

    crew(scene())
    assert sent == []


def test_a_grammar_that_is_slow_is_its_own_requests_error(tiny_model):
    """It had begun to answer, and is refused all the same; nobody else hears of it."""

    async def scene():
        grammar = StructuredOutputsParams(regex="slow[ab]{55}")
        slow = SamplingParams(max_tokens=80, structured_outputs=grammar, output_kind=DELTA)
        heard = []
        free = asyncio.create_task(collect(llm, TEXT[0], SamplingParams(max_tokens=150, ignore_eos=True), "free"))
        with pytest.raises(InvalidParameter, match="take too long"):
            async for output in llm.generate(TEXT[0], slow, "slow"):
                heard += output.outputs[0].token_ids
        assert len(heard) > 4
        assert answer(await free).finish_reason == "length"
        await until(lambda: llm.stats.running == llm.stats.waiting == 0)

    llm = open_async(tiny_model, "grammar", 0.5)
    run(scene(), llm)
