"""Adapters with tokens that the model does not have: tokens and texts are PEFT's, and nobody else's numbers change."""

import json
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import open_model
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaForCausalLM

from adapters import halves, write_adapter, write_with_peft
from quire import BeamSearchParams, SamplingParams
from quire.config.server_args import ServerArgs
from quire.lora.request import LoRARequest
from quire.types.errors import AdapterError, ConfigError, InvalidParameter
from serving import Running, error_of

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not there")
WORDS = ["<x>", "<y>", "<over>"]
BASE = 320
LONG = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
CONFIGS = {
    "saved": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "low": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
}
TEMPLATE = "{% for m in messages %}<x>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<y>{% endif %}"


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory):
    """By name: a directory with an adapter and its tokenizer, and PEFT's model of it."""
    folder, found = tmp_path_factory.mktemp("words"), {}
    for seed, (name, config) in enumerate(CONFIGS.items(), 1):
        model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model.resize_token_embeddings(BASE + len(WORDS), mean_resizing=False)
        with torch.no_grad():
            dice = torch.Generator().manual_seed(seed)
            model.lm_head.weight[BASE:] = torch.randn(len(WORDS), 32, generator=dice)
            model.model.embed_tokens.weight[BASE:] = torch.randn(len(WORDS), 32, generator=dice)
        with warnings.catch_warnings(action="ignore"):
            found[name] = folder / name, write_with_peft(model, folder / name, seed, r=3, lora_alpha=5, **config)
        tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken(word, normalized=False, special=word == "<over>") for word in WORDS])
        tokenizer.save(str(folder / name / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "<over>", "chat_template": TEMPLATE}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def loras(made):
    return {name: LoRARequest(name, i, str(path)) for i, (name, (path, _)) in enumerate(made.items(), 1)} | {"none": None}


def tokenizer_of(made, name):
    return Tokenizer.from_file(str(made[name][0] / "tokenizer.json"))


def expect(made, name, ids, count=14):
    with torch.inference_mode():
        told = made[name][1].generate(
            input_ids=torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
    return told[0, len(ids) :].tolist()


TEMPLATES = [
    ("{% for %}{{", "tokenizer_config.json: the chat template is not valid Jinja (line 1)"),
    ("{{ a | nothing }}", "tokenizer_config.json: the chat template is not valid Jinja (line 1)"),
    ("{{ a }}" * 10_000, "tokenizer_config.json: a chat template may have at most 65,536 characters"),
    ("{{a}}" * 6_000, "tokenizer_config.json: chat templates may have at most 16,000 words and signs"),
    ({str(i): "{{a}}" * 600 for i in range(10)}, "chat templates may have at most 16,000 words and signs"),
    (42, "tokenizer_config.json: chat_template must be a string, or several with names, got 42"),
    ({"a": 42}, "tokenizer_config.json: the chat_template 'a' must be a string, got 42"),
]
PROMPT = "the <y>quick<x> fox"


def test_tokens_texts_and_others(tiny_model, made, loras):
    llm = open_model(tiny_model, dtype="float32", enable_lora=True, max_loras=2, lora_extra_vocab_size=4, max_logprobs=-1)
    plain = open_model(tiny_model, dtype="float32")
    order = ["saved", "none", "low", "none", "saved"]
    outputs = llm.generate([PROMPT] * len(order), LONG, use_tqdm=False, lora_request=[loras[name] for name in order])
    drawn = set()
    for name, output in zip(order, outputs, strict=True):
        [choice] = output.outputs
        if name == "none":
            assert max(output.prompt_token_ids) < BASE
            continue
        tokenizer = tokenizer_of(made, name)
        assert output.prompt_token_ids == tokenizer.encode(PROMPT).ids and max(output.prompt_token_ids) == BASE + 1
        assert choice.token_ids == expect(made, name, output.prompt_token_ids)
        assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        drawn |= {*choice.token_ids}
    assert drawn & {BASE, BASE + 1, BASE + 2}
    # those without: the numbers of an engine without adapters, alone and beside
    ways = SamplingParams(seed=5, max_tokens=10, temperature=1.0, top_k=50, logprobs=5, prompt_logprobs=2)
    mixed = llm.generate([PROMPT] * 2, ways, use_tqdm=False, lora_request=[loras["saved"], None])[1]
    [alone] = plain.generate(PROMPT, ways, use_tqdm=False)
    assert mixed.outputs[0].logprobs == alone.outputs[0].logprobs and mixed.prompt_logprobs == alone.prompt_logprobs
    everything = SamplingParams(max_tokens=1, logprobs=-1)
    assert len(llm.generate("a", everything, use_tqdm=False)[0].outputs[0].logprobs[0]) == BASE

    # an end of its own, what is forbidden, and a grammar, which knows the model's own tokens
    ids = tokenizer_of(made, "saved").encode(PROMPT).ids
    told = expect(made, "saved", ids)
    added = next(token for token in told if token >= BASE)
    stopping = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, stop_token_ids=[added])
    [output] = llm.generate(PROMPT, stopping, use_tqdm=False, lora_request=loras["saved"])
    assert output.outputs[0].token_ids == told[: told.index(added) + 1]
    without = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logit_bias={added: -100.0})
    assert added not in llm.generate(PROMPT, without, use_tqdm=False, lora_request=loras["saved"])[0].outputs[0].token_ids
    beams = llm.beam_search([PROMPT, PROMPT], BeamSearchParams(beam_width=2, max_tokens=5), lora_request=[loras["saved"], None])
    assert beams[0].sequences[0].tokens[: len(ids)] == ids and max(beams[1].sequences[0].tokens) < BASE
    [chat] = llm.chat([{"role": "user", "content": "a"}], LONG, use_tqdm=False, lora_request=loras["low"])
    assert chat.prompt_token_ids[0] == BASE and chat.prompt_token_ids[-1] == BASE + 1
    assert chat.outputs[0].token_ids == expect(made, "low", chat.prompt_token_ids)

    for bad, lora in (([BASE + 1], None), ([BASE + 3], loras["saved"])):
        with pytest.raises(InvalidParameter, match=r"out of vocabulary"):
            llm.generate({"prompt_token_ids": bad}, LONG, use_tqdm=False, lora_request=lora)
    with pytest.raises(InvalidParameter, match="logit_bias"):
        llm.generate("a", without, use_tqdm=False)
    core = llm.llm_engine.core
    core.adapters.check()
    for each in (llm, plain):
        each.llm_engine.shutdown()


def write_unreadable(directory):
    """An adapter whose tokenizer is none."""
    names = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
    path = write_adapter(directory, {name: torch.zeros(BASE + 2, 32) for name in names})
    (Path(path) / "tokenizer.json").write_text("{}")
    return path


def test_what_cannot_be_had(tiny_model, made, tmp_path):
    rows = {"base_model.model.lm_head.weight": torch.zeros(BASE + 2, 32)}
    both = rows | {"base_model.model.model.embed_tokens.weight": torch.zeros(BASE + 1, 32)}
    low = halves("base_model.model.lm_head", BASE + 2, 32)
    paths = {
        "tokenizer.json: the `tokenizers` library .* cannot read it": write_unreadable(tmp_path / "unreadable"),
        "no rows of embed_tokens": write_adapter(tmp_path / "head", rows),
        "another count of added tokens": write_adapter(tmp_path / "both", both),
        "save_embedding_layers": write_adapter(tmp_path / "low", low),
        "needs lora_extra_vocab_size of at least 3, and it is 2": str(made["saved"][0]),
    }
    llm = open_model(tiny_model, dtype="float32", enable_lora=True, lora_extra_vocab_size=2)
    for number, (message, path) in enumerate(paths.items(), 1):
        with pytest.raises(AdapterError, match=message):
            llm.llm_engine.add_lora(LoRARequest(message, number, path))
    llm.llm_engine.shutdown()
    with pytest.raises(ConfigError, match="speculation method synthetic"):
        speculation = {"method": "synthetic", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.5, 0.5]}
        open_model(tiny_model, enable_lora=True, lora_extra_vocab_size=2, speculative_config=speculation)


def test_served_by_two_ranks(tiny_model, made, tmp_path):
    running = Running(
        tiny_model, dtype="float32", enable_lora=True, max_loras=2, lora_extra_vocab_size=8, tensor_parallel_size=2
    )
    try:
        with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:
            for name, (path, _) in made.items():
                assert http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}).status_code == 200
            load = {"lora_name": "unreadable", "lora_path": str(write_unreadable(tmp_path / "unreadable"))}
            refused = http.post("/v1/load_lora_adapter", json=load)
            assert refused.status_code == 400 and "cannot read it" in error_of(refused)["message"]
            for template, message in TEMPLATES:
                folder = shutil.copytree(made["saved"][0], tmp_path / "template", dirs_exist_ok=True)
                (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
                refused = http.post("/v1/load_lora_adapter", json={"lora_name": "template", "lora_path": str(folder)})
                assert refused.status_code == 400 and message in error_of(refused)["message"], refused.text
            tokenizer = tokenizer_of(made, "saved")
            ids = tokenizer.encode(PROMPT).ids
            told = expect(made, "saved", ids)
            body = {
                "prompt": PROMPT,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "max_tokens": 14,
                "logprobs": 1,
            }
            answer = http.post("/v1/completions", json=body | {"model": "saved"}).json()["choices"][0]
            assert (answer["prompt_token_ids"], answer["token_ids"]) == (ids, told)
            assert answer["text"] == tokenizer.decode(told)
            assert not {*WORDS}.isdisjoint(answer["logprobs"]["tokens"])
            shown = "".join(answer["logprobs"]["tokens"])
            assert shown.count("<y>") == told.count(BASE + 1) and shown.count("<x>") == told.count(BASE)
            base = http.post("/v1/completions", json=body | {"model": "tiny"}).json()["choices"][0]
            assert max(base["prompt_token_ids"] + base["token_ids"]) < BASE
            chat = {"model": "low", "messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 6}
            spoken = http.post("/v1/chat/completions", json=chat | {"return_token_ids": True, "ignore_eos": True}).json()
            assert spoken["prompt_token_ids"] == tokenizer.encode("<x>a<y>").ids
            assert spoken["choices"][0]["token_ids"] == expect(made, "low", spoken["prompt_token_ids"], 6)
            for model, count in (("saved", len(ids)), ("tiny", len(base["prompt_token_ids"]))):
                assert http.post("/tokenize", json={"model": model, "prompt": PROMPT}).json()["count"] == count
            text = http.post("/detokenize", json={"model": "low", "tokens": [BASE, 70, BASE + 1]}).json()["prompt"]
            assert text == tokenizer.decode([BASE, 70, BASE + 1])
            error = error_of(http.post("/v1/completions", json=body | {"model": "tiny", "prompt": ids}))
            assert error["code"] == 400 and "out of vocabulary" in error["message"]
        running.wait_idle()
    finally:
        running.close()
