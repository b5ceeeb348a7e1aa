"""The offline API as a vLLM user knows it."""

import gc
import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tiny import TEXT, open_model

from quire import BeamSearchParams, LLMEngine, RequestOutputKind, SamplingParams, step_loop
from quire.types.outputs import FlatLogprobs

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=20, ignore_eos=True)


def generate(llm, *args, **kwargs):
    return llm.generate(*args, use_tqdm=False, **kwargs)


def test_results_come_in_order_and_carry_vllms_fields(llm):
    outputs = generate(llm, TEXT, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)])
    assert [output.prompt for output in outputs] == TEXT
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    tokenizer = llm.get_tokenizer()
    for output in outputs:
        assert output.finished and output.prompt_token_ids == tokenizer.encode(output.prompt)
        assert output.outputs[0].finish_reason == "length" and output.outputs[0].stop_reason is None
        metrics = output.metrics
        assert (
            metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts <= metrics.finished_ts
        )
        assert metrics.num_generation_tokens == len(output.outputs[0].token_ids)
    whole = tokenizer.decode(outputs[0].prompt_token_ids + outputs[0].outputs[0].token_ids)
    assert whole == TEXT[0] + outputs[0].outputs[0].text


def test_prompt_forms_are_equal(llm):
    ids = llm.get_tokenizer().encode(TEXT[0])
    forms = [TEXT[0], ids, {"prompt": TEXT[0]}, {"prompt_token_ids": ids}]
    answers = [generate(llm, form, GREEDY)[0].outputs[0].token_ids for form in forms]
    answers += [output.outputs[0].token_ids for output in generate(llm, forms, GREEDY)]
    assert all(answer == answers[0] for answer in answers)


def test_no_prompts_no_outputs(llm):
    assert generate(llm, [], GREEDY) == []


def test_a_seeded_request_gives_the_same_tokens_whatever_runs_beside_it(llm, tiny_model):
    alone = generate(llm, TEXT[0], SEEDED)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    beside = generate(llm, [TEXT[1], TEXT[0], TEXT[2]], [GREEDY, SEEDED, SamplingParams(max_tokens=30)])
    assert beside[1].outputs[0].token_ids == alone
    for args in (
        {"long_prefill_token_threshold": 3},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 16, "max_model_len": 64},
    ):
        other = open_model(tiny_model, **args)
        outputs = generate(other, [TEXT[0], TEXT[0], TEXT[1]], [SEEDED, SEEDED, SEEDED])
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids == alone
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_unseeded_requests_differ_but_a_run_repeats(tiny_model):
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    runs = [
        [o.outputs[0].token_ids for o in generate(open_model(tiny_model, seed=s), [TEXT[0]] * 2, params)] for s in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_n_answers_share_the_prompt_and_are_the_seeds_own(llm):
    params = SamplingParams(n=3, temperature=1.2, seed=40, max_tokens=16, ignore_eos=True)
    many = generate(llm, TEXT[1], params)[0]
    assert [choice.index for choice in many.outputs] == [0, 1, 2]
    for i, choice in enumerate(many.outputs):
        one = SamplingParams(temperature=1.2, seed=40 + i, max_tokens=16, ignore_eos=True)
        assert generate(llm, TEXT[1], one)[0].outputs[0].token_ids == choice.token_ids


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("interval", [None, 4])
def test_streams_add_up_to_the_final_answer(llm, kind, n, interval):
    settings = {"n": n, "temperature": 1.1, "seed": 5, "max_tokens": 15, "logprobs": 1, "ignore_eos": True}
    llm.reset_prefix_cache()
    final = generate(llm, TEXT[2], SamplingParams(**settings))[0]
    llm.reset_prefix_cache()  # logprobs are compared to the last bit
    engine = llm.llm_engine
    engine.add_request("stream", TEXT[2], SamplingParams(**settings, output_kind=kind, stream_interval=interval))
    text, tokens, scores, steps = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)], 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            steps += 1
            for choice in output.outputs:
                if kind is RequestOutputKind.CUMULATIVE:
                    text[choice.index], tokens[choice.index], scores[choice.index] = "", [], []
                text[choice.index] += choice.text
                tokens[choice.index] += choice.token_ids
                scores[choice.index] += choice.logprobs
    assert text == [choice.text for choice in final.outputs]
    assert tokens == [choice.token_ids for choice in final.outputs]
    assert scores == [choice.logprobs for choice in final.outputs]
    assert steps >= (15 if interval is None else 4)
    if n == 1:
        assert steps == (15 if interval is None else 5)


def test_stop_strings_end_the_text_before_them(llm):
    whole = generate(llm, TEXT[0], GREEDY)[0].outputs[0]
    stop = whole.text[4:6]
    cut = generate(llm, TEXT[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop, "never there"]))[0]
    assert cut.outputs[0].text == whole.text[: whole.text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert len(cut.outputs[0].token_ids) < 12
    kept = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert generate(llm, TEXT[0], kept)[0].outputs[0].text == whole.text[: whole.text.index(stop) + len(stop)]


def test_stop_tokens_and_min_tokens(llm):
    ids = generate(llm, TEXT[0], GREEDY)[0].outputs[0].token_ids
    stop = ids[3]
    first = ids.index(stop)
    ended = generate(llm, TEXT[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]))[0]
    assert ended.outputs[0].token_ids == ids[: first + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", stop)
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=9, ignore_eos=True, stop_token_ids=[stop])
    longer = generate(llm, TEXT[0], params)[0].outputs[0].token_ids
    assert len(longer) >= 9 and stop not in longer[:8]


def test_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = generate(llm, TEXT[0], params)[0]
    choice = output.outputs[0]
    assert len(choice.logprobs) == 5 and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for token, table in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(table)) == token and len(table) == 3  # the greedy token is among the best three
        assert table[token].rank == 1 and table[token].decoded_token == llm.get_tokenizer().decode([token])
        assert [entry.rank for entry in table.values()] == [1, 2, 3]
    assert math.isclose(
        choice.cumulative_logprob, sum(t[i].logprob for i, t in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    for token, table in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert token in table and 2 <= len(table) <= 3
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, flat_logprobs=True, ignore_eos=True)
    flat = generate(llm, TEXT[0], params)[0]
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs) and list(flat.outputs[0].logprobs) == choice.logprobs


def test_prompt_logprobs_are_those_of_transformers(tiny_model):
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(tiny_model).eval()
    for args in ({}, {"long_prefill_token_threshold": 5}):
        llm = open_model(tiny_model, **args)
        output = generate(llm, TEXT[1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
        ids = output.prompt_token_ids
        with torch.inference_mode():
            scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [float(scores[i - 1, ids[i]]) for i in range(1, len(ids))]
        found = [table[token].logprob for token, table in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        assert found == pytest.approx(expected, abs=1e-4)


def test_chat_uses_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert output.prompt == "<user>hi</s><assistant>"
    both = llm.chat([messages, [*messages, {"role": "assistant", "content": "yo"}]], GREEDY, use_tqdm=False)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    going_on = llm.chat(
        [*messages, {"role": "assistant", "content": "yo"}],
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert going_on[0].prompt == "<user>hi</s><assistant>yo"


def test_beam_search_finds_what_a_plain_search_finds(llm, tiny_model):
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(tiny_model).eval()
    for temperature in (0.0, 0.6):
        params = BeamSearchParams(beam_width=3, max_tokens=6, temperature=temperature, length_penalty=0.7)
        found = llm.beam_search(TEXT[:2], params)
        for prompt, output in zip(TEXT, found, strict=False):
            ids = llm.get_tokenizer().encode(prompt)
            expected = _plain_beams(reference, ids, params)
            assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in expected]
            assert [s.cum_logprob for s in output.sequences] == pytest.approx([total for _, total in expected], abs=1e-3)
            assert output.sequences[0].text == llm.get_tokenizer().decode(output.sequences[0].tokens)
            [plain] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=6))
            told = {token: entry.decoded_token for token, entry in plain.outputs[0].logprobs[0].items()}
            assert {token: entry.decoded_token for token, entry in output.sequences[0].logprobs[0].items()} == told


def _plain_beams(reference, prompt, params, eos=1):
    beams, complete = [(list(prompt), 0.0)], []
    for _ in range(params.max_tokens):
        candidates = []
        for tokens, total in beams:
            with torch.inference_mode():
                scores = (reference(torch.tensor([tokens])).logits[0, -1] / (params.temperature or 1.0)).log_softmax(-1)
            best = scores.topk(2 * params.beam_width)
            candidates += [([*tokens, t], total + v) for v, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        complete += [beam for beam in candidates if beam[0][-1] == eos]
        beams = sorted((beam for beam in candidates if beam[0][-1] != eos), key=lambda beam: -beam[1])[: params.beam_width]

    def length(tokens):
        return len(tokens) - (tokens[-1] == eos)

    ranked = sorted(complete + beams, key=lambda beam: -beam[1] / length(beam[0]) ** params.length_penalty)
    return [(t[:-1] if t[-1] == eos else t, total) for t, total in ranked[: params.beam_width]]


def test_a_better_priority_goes_first(tiny_model):
    engine = open_model(tiny_model, scheduling_policy="priority", max_num_seqs=1).llm_engine
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for name, rank in (("late", 5), ("soon", 1), ("now", 0)):
        engine.add_request(name, TEXT[0], params, priority=rank)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["now", "soon", "late"]


def test_abort_at_any_point(llm):
    engine: LLMEngine = llm.llm_engine
    for steps in range(5):
        engine.add_request("a", TEXT[0], SamplingParams(n=2, max_tokens=50, ignore_eos=True))
        engine.add_request("b", TEXT[1], GREEDY)
        for _ in range(steps):
            engine.step()
        engine.abort_request(["a", "unknown"])
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert {output.request_id for output in outputs[-1:]} == {"b"} and outputs[-1].finished
        engine.core.scheduler.roster.check()


def test_an_id_that_is_used_again_at_once(llm):
    """Of its last bearer, which was aborted or ended by a stop string, the core has not told the end yet."""
    engine: LLMEngine = llm.llm_engine
    [expected] = generate(llm, TEXT[1], GREEDY)
    engine.add_request("a", TEXT[0], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    for stop in (None, expected.outputs[0].text[1:3], None):
        engine.add_request("a", TEXT[1], GREEDY.clone() if stop is None else SamplingParams(temperature=0, stop=stop))
        last = None
        while engine.has_unfinished_requests():
            last = next(iter(engine.step()), last)
        assert last.outputs[0].finish_reason == ("stop" if stop else expected.outputs[0].finish_reason)
        assert stop is not None or last.outputs[0].token_ids == expected.outputs[0].token_ids
    engine.step()


def test_ctrl_c_leaves_a_clean_engine(llm):
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(200):
            generate(llm, TEXT, params)
    timer.join()
    assert not llm.llm_engine.has_unfinished_requests()
    assert generate(llm, TEXT[0], GREEDY)[0].finished


def test_calls_of_several_threads_get_their_own_answers(llm):
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def texts(prompt):
        return [output.outputs[0].token_ids for output in generate(llm, prompt, plain)]

    def beams(prompt):
        [found] = llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=6))
        return [beam.tokens for beam in found.sequences]

    calls = [partial(texts, text) for text in TEXT] + [partial(beams, TEXT[0])]
    with ThreadPoolExecutor(8) as threads:
        answers = [future.result(timeout=120) for future in [threads.submit(call) for call in calls * 8]]
    assert answers == [call() for call in calls] * 8
    assert not llm.llm_engine.has_unfinished_requests()


def test_ctrl_c_after_the_last_step_is_not_lost():
    with pytest.raises(KeyboardInterrupt), step_loop.interrupts_between_steps() as check:
        check()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_program_holds_is_not_searched_for_garbage_while_steps_run(llm, monkeypatch):
    gc.unfreeze()  # so have these tests done, or an engine process that other tests played
    monkeypatch.setattr(step_loop, "_put_aside", False)
    frozen: list[int] = []
    step = llm.llm_engine.step_requests
    monkeypatch.setattr(llm.llm_engine, "step_requests", lambda: frozen.append(gc.get_freeze_count()) or step())
    generate(llm, TEXT[0], SamplingParams(max_tokens=3))
    assert min(frozen) > 10_000 and gc.get_freeze_count() == 0
    gc.freeze()  # the program's own doing stays
    try:
        generate(llm, TEXT[0], SamplingParams(max_tokens=3))
        assert gc.get_freeze_count() > 0 and step_loop._put_aside
    finally:
        gc.unfreeze()


def test_tokens_in_tokens_out_without_a_tokenizer(tiny_model, llm):
    bare = open_model(tiny_model, skip_tokenizer_init=True)
    ids = llm.get_tokenizer().encode(TEXT[0])
    output = generate(bare, {"prompt_token_ids": ids}, GREEDY)[0]
    assert output.outputs[0].token_ids == generate(llm, TEXT[0], GREEDY)[0].outputs[0].token_ids
    assert output.outputs[0].text == "" and output.prompt is None


def test_penalties_bias_and_bans_change_the_answer_as_told(llm):
    plain = generate(llm, TEXT[0], GREEDY)[0].outputs[0]
    first = plain.token_ids[0]
    base = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    assert generate(llm, TEXT[0], SamplingParams(**base, logit_bias={first: -100}))[0].outputs[0].token_ids[0] != first
    assert set(generate(llm, TEXT[0], SamplingParams(**base, allowed_token_ids=[5, 6]))[0].outputs[0].token_ids) <= {5, 6}
    forced = generate(llm, TEXT[0], SamplingParams(**base, logit_bias={9: 100}))[0].outputs[0].token_ids
    assert forced == [9] * 12
    penal = generate(llm, TEXT[0], SamplingParams(**base, logit_bias={9: 100}, repetition_penalty=1e9))[0].outputs[0].token_ids
    assert penal != forced
    word = plain.text[:1]
    banned = generate(llm, TEXT[0], SamplingParams(**base, bad_words=[word]))[0].outputs[0]
    assert llm.get_tokenizer().encode(word, add_special_tokens=False)[0] not in banned.token_ids


def test_repetition_is_noticed(llm):
    params = SamplingParams(
        temperature=0, max_tokens=50, ignore_eos=True, logit_bias={9: 100},
        repetition_detection={"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 5},
    )  # fmt: skip
    choice = generate(llm, TEXT[0], params)[0].outputs[0]
    assert choice.finish_reason == "repetition" and choice.token_ids == [9] * 5


def test_cache_salt_keeps_tenants_apart(llm):
    llm.reset_prefix_cache()
    first = generate(llm, {"prompt": TEXT[1], "cache_salt": "a"}, GREEDY)[0]
    other = generate(llm, {"prompt": TEXT[1], "cache_salt": "b"}, GREEDY)[0]
    again = generate(llm, {"prompt": TEXT[1], "cache_salt": "a"}, GREEDY)[0]
    assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 0) and again.num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert generate(llm, {"prompt": TEXT[1], "cache_salt": "a"}, GREEDY)[0].num_cached_tokens == 0
