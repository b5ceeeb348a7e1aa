"""Mistral's own format (params.json, consolidated*.safetensors, tekken.json) gives the tokens of the Hugging Face format."""

import base64
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.args import EngineArgs
from quire.text.parse.registry import detect
from quire.text.tokenizer_files import read_tokenizer
from quire.types.errors import ConfigError, ModelError

CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
)  # fmt: skip
SPECIAL = 24
WORDS = ("th", "he", "the", " t", " th", " the", "in", "er", "re", "ll", "Hel", "Hell", "Hello", "lo", "el", "wor", "ld", "é")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
VOCAB = SPECIAL + 256 + len(WORDS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [1, 30, 99, 200, 41]}, {"prompt_token_ids": [1, *range(50, 80)]}]
ENGINE = {"device": "cpu", "kv_cache_memory_bytes": 1 << 20, "max_model_len": 128, "dtype": "float32"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "rain"},
]


def write_tekken(directory, version="v7"):
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    names = [*CONTROL, *(f"<SPECIAL_{i}>" for i in range(len(CONTROL), SPECIAL))]
    content = {
        "config": {
            "pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": VOCAB,
            "default_num_special_tokens": SPECIAL, "version": version,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for i, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)],
    }  # fmt: skip
    (directory / "tekken.json").write_text(json.dumps(content))
    return directory


def together(tensor, heads):
    """The two halves of every rotary pair next to each other, as Mistral stores queries and keys."""
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()


def mistral_weights(hf, heads, kv_heads):
    names = {
        "model.embed_tokens.": "tok_embeddings.", "model.norm.": "norm.", "lm_head.": "output.", "model.layers.": "layers.",
        ".self_attn.q_proj.": ".attention.wq.", ".self_attn.k_proj.": ".attention.wk.", ".self_attn.v_proj.": ".attention.wv.",
        ".self_attn.o_proj.": ".attention.wo.", ".input_layernorm.": ".attention_norm.",
        ".post_attention_layernorm.": ".ffn_norm.", ".mlp.gate_proj.": ".feed_forward.w1.",
        ".mlp.down_proj.": ".feed_forward.w2.", ".mlp.up_proj.": ".feed_forward.w3.",
    }  # fmt: skip
    out = {}
    for name, tensor in hf.items():
        rotary = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        out[name] = tensor if rotary is None else together(tensor, rotary)
    return out


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The same weights in both formats, by family."""
    made = {}

    def get(family):
        if family in made:
            return made[family]
        import transformers

        sizes = {
            "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": None,
            "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        params = {
            "dim": 32, "n_layers": 2, "hidden_dim": 48, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "norm_eps": 1e-6,
            "vocab_size": VOCAB, "rope_theta": 10000.0, "max_position_embeddings": 256,
        }  # fmt: skip
        if family == "Mixtral":
            sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
            params |= {"moe": {"num_experts": 4, "num_experts_per_tok": 2}, "rope_theta": 1e6}
        torch.manual_seed(3)
        config = getattr(transformers, f"{family}Config")(**sizes)
        hf, own = tmp_path_factory.mktemp(f"{family}-hf"), tmp_path_factory.mktemp(f"{family}-own")
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(hf)
        weights = mistral_weights(load_file(hf / "model.safetensors"), 4, 2)
        save_file(weights, own / "consolidated.safetensors")
        (own / "params.json").write_text(json.dumps(params))
        made[family] = hf, write_tekken(own)
        return made[family]

    return get


def answers(directory, prompts=PROMPTS, **args):
    with LLM(str(directory), **ENGINE, **args) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("family", ["Mistral", "Mixtral"])
def test_both_formats_give_the_same_tokens(formats, family):
    hf, own = formats(family)
    assert answers(own) == answers(hf, skip_tokenizer_init=True)


def test_a_directory_with_both_is_read_as_asked(formats, tmp_path):
    hf, own = formats("Mistral")
    both = shutil.copytree(hf, tmp_path / "both")
    for file in own.iterdir():
        shutil.copy(file, both)
    weights = load_file(both / "consolidated.safetensors")
    save_file({name: tensor.flip(0) if name == "output.weight" else tensor for name, tensor in weights.items()},
              both / "consolidated.safetensors")  # fmt: skip
    expected = answers(hf, skip_tokenizer_init=True)
    assert answers(both, skip_tokenizer_init=True) == expected
    switched = {"config_format": "mistral", "load_format": "mistral", "tokenizer_mode": "mistral"}
    assert answers(both, **switched) != expected
    with LLM(str(both), **ENGINE, **switched) as llm:
        [output] = llm.chat(CHAT[:2], GREEDY, use_tqdm=False)
        assert output.prompt == "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]Hello there[/INST]"
        assert output.prompt_token_ids[:2] == [1, CONTROL.index("[SYSTEM_PROMPT]")]


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_chats_are_written_as_by_mistral_common(tmp_path, version):
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    theirs = MistralTokenizer.from_file(str(write_tekken(tmp_path, version) / "tekken.json"))
    ours = read_tokenizer(tmp_path)
    thanks = [*CHAT, {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "Thanks"}]
    for messages in (CHAT[:2], CHAT[1:2], CHAT[:4], CHAT, thanks):
        for tools in (None, TOOLS):
            expected = theirs.encode_chat_completion(ChatCompletionRequest.from_openai(messages=messages, tools=tools))
            text = theirs.decode(expected.tokens, SpecialTokenPolicy.KEEP)
            assert ours.apply_chat_template(messages, tokenize=False, tools=tools) == text
            assert ours.apply_chat_template(messages, tools=tools) == expected.tokens
    tekken = theirs.instruct_tokenizer.tokenizer
    for text in ("Hello the world", "in the  weather\n\n 42é漢", "thethe there", ""):
        assert ours.encode(text, add_special_tokens=False) == tekken.encode(text, bos=False, eos=False)
        assert ours.encode(text) == tekken.encode(text, bos=True, eos=False)
        assert ours.decode(ours.encode(text)) == text


TOLD = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": '
    '{"type": "object"}}}][/AVAILABLE_TOOLS]'
)
FIRST, LISTED = "[INST]Hello there[/INST]Hello</s>", '{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}'
SYSTEM = "[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT]"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("v3", f"<s>{FIRST}{TOLD}[INST]Be kind.\n\nthe weather?[/INST][TOOL_CALLS][{LISTED}]</s>"
               '[TOOL_RESULTS]{"content": "rain", "call_id": "abcdefghi"}[/TOOL_RESULTS]'),
        ("v7", f"<s>{SYSTEM}{FIRST}{TOLD}[INST]the weather?[/INST][TOOL_CALLS][{LISTED}]</s>"
               "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]rain[/TOOL_RESULTS]"),
        ("v11", f"<s>{SYSTEM}{FIRST}{TOLD}[INST]the weather?[/INST][TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]"
                '{"city": "Paris"}</s>[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]rain[/TOOL_RESULTS]'),
        ("v13", f"<s>{SYSTEM}{TOLD}{FIRST}[INST]the weather?[/INST][TOOL_CALLS]weather[ARGS]"
                '{"city": "Paris"}</s>[TOOL_RESULTS]rain[/TOOL_RESULTS]'),
    ],
)  # fmt: skip
def test_the_chat_format_of_each_version(tmp_path, version, expected):
    """As mistral-common writes it, also where that is not installed."""
    tokenizer = read_tokenizer(write_tekken(tmp_path, version))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, tools=TOOLS) == expected
    assert detect(tokenizer.chat_template, "tool calls") == "mistral"


def test_what_cannot_be_read_is_refused(formats, tmp_path):
    hf, own = formats("Mistral")
    with pytest.raises(ModelError, match=r"has no params\.json"):
        answers(hf, config_format="mistral", skip_tokenizer_init=True)
    with pytest.raises(ModelError, match=r"config\.json"):
        answers(own, config_format="hf", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"requires tekken\.json"):
        answers(hf, tokenizer_mode="mistral")
    with pytest.raises(ConfigError, match="config_format='mistral'"):
        EngineArgs(load_format="mistral", config_format="hf")
    params = json.loads((own / "params.json").read_text())
    (tmp_path / "params.json").write_text(json.dumps(params | {"vision_encoder": {"hidden_size": 4}}))
    with pytest.raises(ModelError, match="vision_encoder: media are not supported"):
        answers(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    write_tekken(tmp_path, "v99")
    with pytest.raises(ModelError, match="version must be one of v3, v7, v11, v13; got v99"):
        read_tokenizer(tmp_path)
