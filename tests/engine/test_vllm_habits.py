"""What users of vLLM's offline API are used to: arguments that are only hints, and methods beside generate."""

import json
import shutil

import pytest
from tiny import TEXT, open_model

from quire import SamplingParams
from quire.types.errors import ModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def ids(llm, prompt, params=GREEDY, **options):
    return llm.generate(prompt, params, use_tqdm=False, **options)[0].outputs[0].token_ids


# ---- hints


def test_hints_change_no_answer(llm, tiny_model, caplog):
    hinted = open_model(
        tiny_model, trust_remote_code=True, compilation_config={"mode": 3}, attention_backend="FLASH_ATTN", swap_space=4,
        disable_custom_all_reduce=True, structured_outputs_config={"backend": "xgrammar"}, distributed_executor_backend="mp",
        limit_mm_per_prompt={"image": 0}, max_seq_len_to_capture=512,
    )  # fmt: skip
    assert ids(hinted, TEXT[0]) == ids(llm, TEXT[0])
    for name in ("trust_remote_code", "compilation_config", "attention_backend", "swap_space", "disable_custom_all_reduce"):
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
