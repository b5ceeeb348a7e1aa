"""What users of vLLM's offline API are used to: arguments that are only hints, and methods beside generate."""

import json
import shutil
import socket

import pytest
from tiny import TEXT, open_model

from quire import LLM, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from quire.obs.offline import Counter, Gauge, Histogram
from quire.types.errors import ConfigError, EngineError, InvalidParameter, ModelError, NotSupported
from quire.types.outputs import FlatLogprobs

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def ids(llm, prompt, params=GREEDY, **options):
    return llm.generate(prompt, params, use_tqdm=False, **options)[0].outputs[0].token_ids


def test_what_programs_read_of_the_model(llm, tiny_model):
    import torch
    from transformers import AutoConfig

    config, theirs = llm.model_config, AutoConfig.from_pretrained(tiny_model)
    assert llm.llm_engine.model_config == config and (config.model, config.tokenizer) == (str(tiny_model), str(tiny_model))
    assert (config.dtype, config.max_model_len) == (torch.float32, llm.llm_engine.max_model_len)
    assert (config.get_vocab_size(), config.get_hidden_size()) == (theirs.vocab_size, theirs.hidden_size)
    assert config.hf_config.num_hidden_layers == config.get_total_num_hidden_layers() == theirs.num_hidden_layers
    assert config.get_head_size() == theirs.hidden_size // theirs.num_attention_heads
    assert config.get_total_num_kv_heads() == theirs.num_key_value_heads and config.get_sliding_window() is None
    assert config.hf_config.to_dict()["model_type"] == "llama" and config.runner_type == "generate"


def test_tools_are_described_to_a_template_without_a_place_for_them(llm):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    told, plain = (
        llm.preprocess_chat([{"role": "user", "content": "rain?"}], tools=tools)[0]["prompt"] for tools in ([tool], None)
    )
    assert '"name": "weather"' in told and "<tool_call>" in told and "rain?" in told
    assert plain == "<user>rain?</s><assistant>"


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}])
def test_a_message_without_content_is_empty(llm, message):
    [output] = llm.chat([message], GREEDY, chat_template="{{ 'a' + messages[0].content + 'b' }}", use_tqdm=False)
    assert output.prompt == "ab"


# ---- hints


def test_hints_change_no_answer(llm, tiny_model, caplog):
    hinted = open_model(
        tiny_model, trust_remote_code=True, compilation_config={"mode": 3}, attention_backend="FLASH_ATTN", swap_space=4,
        disable_custom_all_reduce=True, structured_outputs_config={"backend": "xgrammar"}, distributed_executor_backend="mp",
        limit_mm_per_prompt={"image": 0}, max_seq_len_to_capture=512,
    )  # fmt: skip
    assert ids(hinted, TEXT[0]) == ids(llm, TEXT[0])
    for name in ("trust_remote_code", "compilation_config", "attention_backend", "disable_custom_all_reduce"):
        assert f"{name}=" in caplog.text
    hinted.llm_engine.shutdown()


def test_a_model_that_names_code_and_needs_none_is_served(llm, tiny_model, tmp_path):
    """Many repositories carry the code of a model that is built in by now."""
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling.Llama"}}))
    (directory / "modeling.py").write_text("raise SystemExit('this must not be run')")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": ["t.T", None]}}))
    trusted = open_model(directory, trust_remote_code=True)
    assert ids(trusted, TEXT[0]) == ids(llm, TEXT[0])
    trusted.llm_engine.shutdown()


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_one_that_needs_its_own_code_is_refused(tiny_model, tmp_path, part):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    if part == "model":
        config = json.loads((directory / "config.json").read_text())
        novel = {"model_type": "novel", "architectures": ["Novel"], "auto_map": {"AutoModelForCausalLM": "m.Novel"}}
        (directory / "config.json").write_text(json.dumps(config | novel))
    else:
        (directory / "tokenizer.json").rename(directory / "novel_tokenizer.bin")
        own = {"tokenizer_class": "Novel", "auto_map": {"AutoTokenizer": ["t.Novel", None]}}
        (directory / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError, match="code from its own repository, which is never run"):
        open_model(directory, trust_remote_code=True)


# ---- logprobs


def test_without_detokenizing_there_is_no_text_anywhere(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(TEXT[0], params, use_tqdm=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3
    for position in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
        assert {entry.decoded_token for entry in position.values()} == {None}


def test_a_character_in_pieces_is_told_by_the_token_that_completes_it(llm):
    tokenizer = llm.get_tokenizer()
    lead, middle, last = tokenizer.encode("€")
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[last], logprobs=0, prompt_logprobs=0)
    [output] = llm.generate([lead, middle], params, use_tqdm=False)
    assert output.prompt_logprobs[1][middle].decoded_token == ""
    assert output.outputs[0].logprobs[0][last].decoded_token == "€"
    [lone] = llm.generate(TEXT[0], params, use_tqdm=False)
    assert lone.outputs[0].logprobs[0][last].decoded_token == ""


def test_pages_that_are_new_in_the_cache_are_counted(llm):
    prompt = {"prompt": TEXT[1], "cache_salt": "counted"}
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    whole = len(first.prompt_token_ids)
    assert (first.num_cached_tokens, first.num_cache_creation_tokens) == (0, whole // 4 * 4)
    assert second.num_cached_tokens + second.num_cache_creation_tokens == whole // 4 * 4


def test_flat_logprobs_are_extended(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, flat_logprobs=True)
    one, other = (llm.generate(text, params, use_tqdm=False)[0].outputs[0].logprobs for text in TEXT[:2])
    expected = [*one, *other, *other]
    one.extend(other)
    one.extend(list(other))
    assert isinstance(one, FlatLogprobs) and list(one) == expected and one[4] == other[1] and list(one[-2:]) == expected[-2:]


def test_offline_there_may_be_many_stop_strings(llm):
    plain = llm.generate(TEXT[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = [*(f"never {i}" for i in range(40)), plain[-1]]
    [output] = llm.generate(TEXT[0], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=stop), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (plain[: plain.index(plain[-1])], plain[-1])


# ---- methods


def test_metrics_as_objects(tiny_model):
    counted = open_model(tiny_model, disable_log_stats=False)
    outputs = counted.generate([TEXT[0], TEXT[0], TEXT[1]], GREEDY, use_tqdm=False)
    metrics = {(metric.name, *list(metric.labels.values())[2:]): metric for metric in counted.get_metrics()}
    generated, prompts = metrics["vllm:generation_tokens",], metrics["vllm:prompt_tokens",]
    assert isinstance(generated, Counter) and generated.value == 24
    assert prompts.value == sum(len(output.prompt_token_ids) for output in outputs)
    assert generated.labels == {"model_name": str(tiny_model), "engine": "0"}
    assert isinstance(metrics["vllm:num_requests_running",], Gauge) and metrics["vllm:num_requests_running",].value == 0
    assert metrics["vllm:request_success", "length"].value == 3
    assert metrics["vllm:prefix_cache_queries",].value > 0
    steps = metrics["vllm:iteration_tokens_total",]
    assert isinstance(steps, Histogram) and steps.sum == prompts.value + 24
    assert steps.count == steps.buckets["+Inf"] == 8 and steps.buckets["1.0"] == 0
    assert counted.get_metrics() == counted.get_metrics()
    counted.llm_engine.shutdown()


def test_metrics_are_counted_only_if_asked_for(llm):
    with pytest.raises(NotSupported, match="disable_log_stats=False"):
        llm.get_metrics()


def test_tokenization_kwargs(llm):
    tokenizer = llm.get_tokenizer()
    whole = tokenizer.encode(TEXT[0])
    assert len(whole) > 6

    def prompt_of(prompt, **given):
        return llm.generate(prompt, GREEDY, use_tqdm=False, tokenization_kwargs=given)[0].prompt_token_ids

    assert prompt_of(TEXT[0], truncation=True, max_length=5) == whole[:5]
    assert prompt_of(TEXT[0], truncation=True, max_length=5, truncation_side="left") == whole[-5:]
    assert prompt_of({"prompt": TEXT[0], "cache_salt": "s"}, truncate_prompt_tokens=4) == whole[-4:]
    assert prompt_of(whole, truncate_prompt_tokens=4) == whole[-4:]
    assert prompt_of(TEXT[0].upper(), do_lower_case=True, padding=False) == whole
    assert len(prompt_of("a b " * 500, truncate_prompt_tokens=-1)) == 255
    for wrong, message in (
        ({"max_length": 5}, "max_length needs truncation"),
        ({"truncation": True, "max_length": 0}, "max_length must be"),
        ({"padding": True}, "padding must be one of"),
        ({"return_tensors": "pt"}, "has no 'return_tensors'"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_of(TEXT[0], **wrong)


def test_tokenization_kwargs_and_special_tokens(tiny_model, tmp_path):
    """A tokenizer that puts a token before every text and one behind: cutting leaves them."""
    from tokenizers import Tokenizer, processors

    directory = shutil.copytree(tiny_model, tmp_path / "model")
    fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    fast.save(str(directory / "tokenizer.json"))
    llm = open_model(directory)
    bare = llm.get_tokenizer().encode(TEXT[0], add_special_tokens=False)
    told = [
        llm.generate(TEXT[0], GREEDY, use_tqdm=False, tokenization_kwargs=given)[0].prompt_token_ids
        for given in ({}, {"add_special_tokens": False}, {"truncation": True, "max_length": 6})
    ]
    assert told == [[0, *bare, 1], bare, [0, *bare[:4], 1]]
    message = [{"role": "user", "content": "a"}]
    plain, special = (
        llm.chat(message, GREEDY, use_tqdm=False, tokenization_kwargs=given)[0].prompt_token_ids
        for given in (None, {"add_special_tokens": True})
    )
    assert special == [0, *plain, 1]
    llm.llm_engine.shutdown()


PARTS = "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}{% for p in m.content %}<{{ p.type }}:{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"  # noqa: E501
FLAT = "{% for m in messages %}{{ m.content }}|{% endfor %}"


def test_what_templates_get_as_content(llm):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]

    def prompt(template, **options):
        return llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template, **options)[0].prompt

    assert prompt(PARTS) == "[s]<text:a><text:b>"
    assert prompt(PARTS, chat_template_content_format="openai") == "<text:s><text:a><text:b>"
    assert prompt(PARTS, chat_template_content_format="string") == "[s][a\nb]"
    assert prompt(FLAT) == "s|a\nb|"
    with pytest.raises(InvalidParameter, match="must be one of auto, string, openai"):
        prompt(FLAT, chat_template_content_format="parts")


def test_parameters_from_optional_values():
    params = SamplingParams.from_optional(
        n=None, temperature=0.5, top_p=None, stop=None, logit_bias={"3": 200.0}, max_tokens=None
    )
    assert params == SamplingParams(temperature=0.5, logit_bias={3: 100.0}, max_tokens=None)
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams.from_optional(temperature=3.0)


def test_beam_search_of_few_prompts_at_a_time(llm, monkeypatch):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    together = llm.beam_search(TEXT, params)
    sizes = []
    import quire.llm

    real = quire.llm.search_beams
    monkeypatch.setattr(
        "quire.llm.search_beams", lambda engine, batch, *a, **k: sizes.append(len(batch)) or real(engine, batch, *a, **k)
    )
    apart = llm.beam_search(TEXT, params, concurrency_limit=2)
    assert sizes == [2, 1]
    assert [[beam.tokens for beam in one.sequences] for one in apart] == [[b.tokens for b in one.sequences] for one in together]
    for wrong in (0, -1, "2"):
        with pytest.raises(InvalidParameter, match="concurrency_limit must be at least 1"):
            llm.beam_search(TEXT, params, concurrency_limit=wrong)


def test_enqueue_and_wait(llm):
    names = llm.enqueue(TEXT[:2], GREEDY) + llm.enqueue_chat([{"role": "user", "content": "a"}], GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == names
    assert [output.outputs[0].token_ids for output in outputs[:2]] == [ids(llm, text) for text in TEXT[:2]]
    assert outputs[2].prompt == "<user>a</s><assistant>"
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_smaller_things(llm):
    assert llm.get_world_size() == 1 and llm.reset_mm_cache() is None
    [prompt] = llm.preprocess_chat([{"role": "user", "content": "a"}])
    assert prompt["prompt"] == "<user>a</s><assistant>"
    assert llm.get_tokenizer().decode(prompt["prompt_token_ids"], skip_special_tokens=False) == prompt["prompt"]


@pytest.mark.parametrize("name", ["apply_model", "wake_up", "sleep"])
def test_what_is_not_there_says_so(llm, name):
    with pytest.raises(NotSupported, match=f"LLM.{name} is not available: "):
        getattr(llm, name)("x")


def test_pieces_of_a_stream(tiny_model):
    from quire import RequestOutputKind

    llm = open_model(tiny_model, stream_interval=3)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", TEXT[0], params)
    sizes = []
    while engine.has_unfinished_requests():
        sizes += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert sizes == [1, 3, 3, 1]
    engine.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ],
)
def test_the_cache_is_reset_between_steps(llm, tiny_model, options):
    """Running requests compute everything again, and answer as if nothing had happened."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(TEXT, params, use_tqdm=False)]
    engine = open_model(tiny_model, **options).llm_engine
    for name, text in enumerate(TEXT):
        engine.add_request(str(name), text, params)
    done, steps = {}, 0
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps == 6:
            assert not engine.reset_prefix_cache()
            assert engine.reset_prefix_cache(reset_running_requests=True)
            engine.core.scheduler.roster.check()
    assert [done[str(name)].outputs[0].token_ids for name in range(3)] == expected
    assert all(output.metrics.num_preemptions == 1 for output in done.values())
    engine.core.scheduler.roster.check()
    assert engine.core.stats.free_pages == engine.core.stats.pages
    engine.shutdown()


def test_engines_are_made_from_engine_args_by_keyword(tiny_model):
    small = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    llm = LLM.from_engine_args(engine_args=EngineArgs(str(tiny_model), **small))
    engine = LLMEngine.from_engine_args(engine_args=EngineArgs(str(tiny_model), **small), usage_context="ENGINE_CONTEXT")
    assert engine.vllm_config.model_config == engine.model_config and engine.get_supported_tasks() == ("generate",)
    assert engine.vllm_config.parallel_config.world_size == llm.get_world_size() == 1
    assert engine.collective_rpc("describe_rank")[0]["ranks"] == 1 and not engine.is_sleeping()
    for name in ("apply_model", "encode", "get_metrics", "set_weight_version", "sleep", "from_vllm_config"):
        with pytest.raises(NotSupported, match=f"LLMEngine.{name} is not available: "):
            getattr(engine, name)("x")
    for name in ("create_engine_config", "create_model_config"):
        with pytest.raises(NotSupported, match=f"EngineArgs.{name} is not available: "):
            getattr(EngineArgs(str(tiny_model), **small), name)()
    llm.llm_engine.shutdown()
    engine.shutdown()


def test_fewer_tokens_are_scheduled_than_a_step_holds(llm, tiny_model):
    """max_num_scheduled_tokens: a prompt of 40 tokens takes five steps of 8."""
    engine = open_model(tiny_model, max_num_batched_tokens=64, max_num_scheduled_tokens=8, max_num_seqs=4).llm_engine
    engine.add_request("a", {"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=1))
    steps = 1
    while not engine.step():
        steps += 1
    engine.shutdown()
    assert steps == 5
    with pytest.raises(ConfigError, match="max_num_scheduled_tokens must be at most max_num_batched_tokens"):
        open_model(tiny_model, max_num_batched_tokens=64, max_num_scheduled_tokens=65, max_num_seqs=4)


def test_ranks_wait_for_other_machines_as_long_as_they_are_to(tiny_model):
    with pytest.raises(EngineError, match=r"node 1 \(rank 1\) did not connect within 0.2 s"):
        open_model(tiny_model, tensor_parallel_size=2, nnodes=2, distributed_timeout_seconds=0.2, master_port=free_port())


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
