"""Quantized checkpoints: every scheme gives the numbers of the model that it stands for, in any company."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle import Sequences, in_pieces
from quantized_checkpoints import SCHEMES, write
from quire import LLM, SamplingParams
from quire.config.devices import KEEPS as KEPT
from quire.config.facts import read_facts
from quire.config.quantization import Quantization
from quire.device.cpu.prepare import convert_quantized_layers, multiply_by_layer
from quire.dist.mesh import Position
from quire.files.resolve import resolve_model
from quire.layers.embedding import PlainHead
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.quant.gguf import GGUFMethod
from quire.layers.quant.stored import StoredExperts, StoredHead, StoredLinear
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.prepare.quantize import find_grain
from quire.prepare.shard import shard
from quire.types.errors import ConfigError, ModelError
from serving import NAME, Running
from tiny_model import make_tokenizer

FIRST, SECOND = [list(torch.randint(2, 320, (40,), generator=torch.Generator().manual_seed(seed))) for seed in (1, 2)]
FIRST, SECOND = [int(token) for token in FIRST], [int(token) for token in SECOND]
KEEPS = KEPT["cuda"] | {"experts"}
WHOLE_NUMBERS = (
    "awq",
    "gptq-head",
    "gptq-8",
    "ct-int4-asymmetric",
    "ct-int8",
    "ct-w8a8",
    "bnb-int8",
)  # that a CPU multiplies by


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a scheme, written once."""
    made = {}

    def get(scheme):
        if scheme not in made:
            made[scheme] = write(scheme, tmp_path_factory.mktemp(scheme))
        return made[scheme]

    return get


def load(directory, keeps=frozenset(), quantization=None, **changes):
    facts = read_facts(resolve_model(directory), changes)
    model = build_model(facts)
    load_weights(
        model, facts, device="cpu", dtype="float32", quantization=quantization or facts.quantization, keeps=frozenset(keeps)
    )
    return model


def floats(directory):
    return load(directory.parent / "floats")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forms_give_the_numbers_of_the_model_they_stand_for(checkpoint, scheme):
    directory = checkpoint(scheme)
    model, expected = load(directory, KEEPS), floats(directory)
    for got, wanted in zip(in_pieces(model, FIRST, SECOND), in_pieces(expected, FIRST, SECOND), strict=True):
        assert (got - wanted).abs().max() < 1e-3
    kept = [type(layer.method) for layer in model.modules() if isinstance(layer, Linear | Experts)]
    assert isinstance(model.lm_head.method, StoredHead if scheme.endswith("-head") else PlainHead)
    quantized = kept.count(StoredLinear) + kept.count(StoredExperts)
    assert quantized == {"ct-several": 6}.get(
        scheme, 3 if scheme.endswith("-moe") else 8
    )  # routers and what was ignored are not


@pytest.mark.parametrize("scheme", WHOLE_NUMBERS)
def test_a_cpu_multiplies_by_whole_numbers_as_they_are(checkpoint, scheme):
    directory = checkpoint(scheme)
    model = load(directory, KEPT["cpu"])
    convert_quantized_layers(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    assert all(isinstance(layer.method, GGUFMethod) for layer in layers)
    multiply_by_layer(model)
    got, wanted = (Sequences(each, 1, len(FIRST)).step([(0, FIRST)])[0] for each in (model, floats(directory)))
    assert (got - wanted).abs().max() < 0.15 * wanted.abs().max()  # rows are rounded to 8 bits
    assert (got - wanted).abs().mean() < 0.01 * wanted.abs().max()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_requests_in_any_company(checkpoint, scheme):
    """Together, in chunks, and again when their beginnings are cached; with a type of their own, so all matrices are floats."""
    directory = checkpoint(scheme)
    llm = LLM(str(directory), dtype="float32", device="cpu", skip_tokenizer_init=True, block_size=8, max_num_seqs=3,
              max_num_batched_tokens=16, num_gpu_blocks_override=64, max_model_len=64)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in (FIRST, SECOND, FIRST[:20] + SECOND[:9])]
    expected = floats(directory)
    for _ in range(2):
        for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            ids = prompt["prompt_token_ids"]
            answer = list(out.outputs[0].token_ids)
            logits = Sequences(expected, 1, 64).step([(0, ids + answer)])[0][len(ids) - 1 : -1]
            assert logits.argmax(-1).tolist() == answer
            for row, found in zip(torch.log_softmax(logits, -1), out.outputs[0].logprobs, strict=True):
                assert all(abs(row[token].item() - each.logprob) < 1e-3 for token, each in found.items())
    assert out.num_cached_tokens > 0


def test_a_request_is_served(checkpoint):
    """By the CPU's kernels for whole numbers: their answer is that of the floats but for near ties."""
    directory = checkpoint("gptq")
    make_tokenizer(directory)
    server = Running(directory, quantization="gptq_marlin")
    try:
        body = {"model": NAME, "prompt": FIRST, "max_tokens": 4, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"][0]
    finally:
        server.close()
    ids = answer["token_ids"]
    logits = Sequences(floats(directory), 1, 64).step([(0, FIRST + ids)])[0][len(FIRST) - 1 : -1]
    likely = torch.log_softmax(logits, -1)
    for row, token, told in zip(likely, ids, answer["logprobs"]["token_logprobs"], strict=True):
        assert row[token] > row.max() - 0.2 and abs(row[token].item() - told) < 0.2


def test_floats_become_fp8_when_loaded(checkpoint):
    directory = checkpoint("awq").parent / "floats"
    online = Quantization("fp8", {}, online=True)
    kept, rounded, exact = load(directory, KEEPS, online), load(directory, (), online), load(directory)
    runs = [Sequences(each, 1, len(FIRST)).step([(0, FIRST)])[0] for each in (kept, rounded, exact)]
    assert (runs[0] - runs[1]).abs().max() < 1e-3
    assert 1e-3 < (runs[0] - runs[2]).abs().max() < 0.2 * runs[2].abs().max()
    matrix = kept.layers[0].mlp.down_proj.method.matrix
    assert matrix.numbers.dtype == torch.float8_e4m3fn and matrix.scale.shape == (128, 1)


# ---- what is wrong in a detail ----------------------------------------------------------------------------------------------


def damaged(source, target, tensors=None, config=None):
    """A copy of a checkpoint with other tensors, or another quantization_config."""
    target.mkdir()
    found = load_file(source / "model.safetensors")
    for name, change in (tensors or {}).items():
        value = change(found[name])
        found.pop(name) if value is None else found.update({name: value.contiguous()})
    save_file(found, target / "model.safetensors")
    settings = json.loads((source / "config.json").read_text())
    settings["quantization_config"] |= config or {}
    (target / "config.json").write_text(json.dumps(settings))
    return target


def filled(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return change


def byte(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(torch.uint8).view(-1)[3] = value
        return tensor

    return change


def told(state):
    return lambda tensor: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


AT = "model.layers.1.self_attn.k_proj"
EXPERT = "model.layers.0.mlp.experts.2.up_proj"
NESTED_STATE = f"{AT}.weight.quant_state.bitsandbytes__nf4"
WRONG = {
    "zero scale": ("awq", {f"{AT}.scales": filled(0.0)}, {}, r"layers\.1\.self_attn\.k_proj\.scales has a scale of 0"),
    "scale not a number": ("ct-int4", {f"{AT}.weight_scale": filled(float("nan"))}, {}, r"k_proj\.weight_scale has .* of NaN"),
    "infinite scale": ("fp8-block", {"model.layers.0.mlp.down_proj.weight_scale_inv": lambda t: t / 0}, {},
                       r"down_proj\.weight_scale_inv has a scale of infinity"),
    "missing scale": ("gptq", {f"{AT}.scales": lambda t: None}, {}, r"missing \(1\): layers\.1\.self_attn\.k_proj\.scales"),
    "wrong shape": ("ct-int4", {f"{AT}.weight_scale": lambda t: t[:, :1]}, {}, r"k_proj\.weight_scale is \[64, 1\], "),
    "wrong type": ("fp8-block", {f"{AT}.weight": lambda t: t.view(torch.int8)}, {}, r"k_proj\.weight' is stored as torch"),
    "groups that do not divide": ("awq", {}, {"group_size": 48}, r"q_proj: groups of 48 do not divide its 128 inputs"),
    "bits": ("gptq", {}, {"bits": 3}, r"GPTQ requires 4 or 8 bits; got 3"),
    "bits of a group": ("ct-int4", {}, {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 5,
                        "group_size": 32}}}}, r"q_proj: int of 5 bits in the format 'pack-quantized' is not supported"),
    "strategy": ("ct-int4", {}, {"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "spiral"}}}},
                 r"unknown strategy 'spiral'"),
    "layout": ("awq", {}, {"version": "gemv"}, r"AWQ's version must be gemm; got 'gemv'"),
    "uneven act-order": ("gptq-act-order", {f"{AT}.g_idx": lambda t: t * 0}, {}, r"k_proj\.g_idx does not put 32 inputs into"),
    "algorithm": ("modelopt-fp8", {}, {"quant_algo": "INT3"}, r"quant_algo 'INT3' is not supported"),
    "sparse": ("ct-int4", {}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config is not supported"),
    "whole numbers as scales": ("gptq", {f"{AT}.scales": lambda t: t.to(torch.int32)}, {},
                                r"model\.layers\.1\.self_attn\.k_proj\.scales must have floats; got I32"),
    "bytes as scales": ("ct-fp8-channel", {f"{AT}.weight_scale": lambda t: t.to(torch.uint8)}, {},
                        r"k_proj\.weight_scale must have floats; got U8"),
    "act-order without its order": ("gptq-act-order", {f"{AT}.g_idx": lambda t: None}, {}, r"missing \(1\): .*k_proj\.g_idx"),
    "no state": ("bnb-nf4-nested", {NESTED_STATE: lambda t: None}, {}, r"missing \(1\): .*k_proj\.weight\.quant_state"),
    "state without an offset": ("bnb-nf4-nested", {NESTED_STATE: told({})}, {}, r"nested_offset must be a finite number"),
    "an offset in words": ("bnb-nf4-nested", {NESTED_STATE: told({"nested_offset": "x"})}, {}, r"a finite number; got 'x'"),
    "a state that is a list": ("bnb-nf4-nested", {NESTED_STATE: told([1])}, {}, r"nf4 must be an object; got \[1\]"),
    "a state of another matrix": ("bnb-nf4-nested", {NESTED_STATE: told({"shape": [7, 7]})}, {},
                                  r"shape must be \[64, 128\]; got \[7, 7\]"),
    "a scale below 0": ("fp8-tensor", {f"{AT}.weight_scale": torch.neg}, {}, r"k_proj\.weight_scale has a scale below 0"),
    "an input scale below 0": ("fp8-tensor", {f"{AT}.input_scale": torch.neg}, {}, r"k_proj\.input_scale has a scale below 0"),
    "a block's scale below 0": ("fp8-block-moe", {f"{EXPERT}.weight_scale_inv": torch.neg}, {},
                                r"experts\.2\.up_proj\.weight_scale_inv has a scale below 0"),
    "a factor below 0": ("modelopt-nvfp4", {f"{AT}.weight_scale_2": torch.neg}, {}, r"weight_scale_2 has a scale below 0"),
    "a divisor below 0": ("ct-nvfp4", {f"{AT}.weight_global_scale": torch.neg}, {}, r"weight_global_scale has a scale below 0"),
    "a sign in scales of nvfp4": ("modelopt-nvfp4", {f"{AT}.weight_scale": byte(0xC0)}, {}, r"k_proj\.weight_scale .* below 0"),
    "an unused scale of 0": ("modelopt-nvfp4", {f"{AT}.input_scale": lambda t: t * 0}, {}, r"k_proj\.input_scale has .* of 0"),
    "an unused scale below 0": ("modelopt-nvfp4", {f"{AT}.input_scale": torch.neg}, {}, r"k_proj\.input_scale has .* below 0"),
    "unused scales": ("modelopt-nvfp4", {f"{AT}.input_scale": lambda t: torch.ones(2)}, {}, r"k_proj\.input_scale is \[2\], "),
    "an unused scale of an expert": ("modelopt-nvfp4-moe", {f"{EXPERT}.input_scale": lambda t: t / 0 * 0}, {},
                                     r"experts\.2\.up_proj\.input_scale has a scale of NaN"),
    "an unused divisor": ("ct-nvfp4", {f"{AT}.input_global_scale": lambda t: t / 0}, {}, r"input_global_scale has .* infinity"),
    "another table": ("bnb-nf4", {f"{AT}.weight.quant_map": filled(0.7)}, {}, r"k_proj\.weight\.quant_map is not the table"),
    "a table that is too short": ("bnb-nf4", {f"{AT}.weight.quant_map": lambda t: t[:8]}, {}, r"quant_map is \[8\], "),
    "a nested table": ("bnb-nf4-nested", {f"{AT}.weight.nested_quant_map": filled(1e30)}, {}, r"nested_quant_map must ascend"),
    "NaN in a nested table": ("bnb-nf4-nested", {f"{AT}.weight.nested_quant_map": filled(float("nan"))}, {},
                              r"k_proj\.weight\.nested_quant_map must ascend within -1 to 1"),
    "a nested scale below 0": ("bnb-nf4-nested", {f"{AT}.weight.nested_absmax": torch.neg}, {}, r"nested_absmax .* below 0"),
    "absmax below 0": ("bnb-nf4", {f"{AT}.weight.absmax": filled(-0.1)}, {}, r"k_proj\.weight\.absmax has a scale below 0"),
    "SCB below 0": ("bnb-int8", {f"{AT}.SCB": filled(-0.1)}, {}, r"k_proj\.SCB has a scale below 0"),
    "SCB of 0": ("bnb-int8", {f"{AT}.SCB": filled(0.0)}, {}, r"k_proj\.SCB has a scale of 0, NaN or an infinity"),
    "SCB not a number": ("bnb-int8", {f"{AT}.SCB": filled(float("nan"))}, {}, r"k_proj\.SCB has a scale of 0, NaN or an inf"),
    "NaN in scales of nvfp4": ("ct-nvfp4", {f"{AT}.weight_scale": byte(0xFF)}, {}, r"k_proj\.weight_scale has a NaN"),
    "a tiny divisor": ("ct-nvfp4", {f"{AT}.weight_global_scale": lambda t: t * 0 + 1e-45}, {}, r"global_scale is too small"),
    "NaN in scales of mxfp4": ("ct-mxfp4", {f"{AT}.weight_scale": byte(255)}, {}, r"k_proj\.weight_scale has a scale of NaN"),
    "huge scales of mxfp4": ("ct-mxfp4", {f"{AT}.weight_scale": byte(254)}, {}, r"scale of infinity or close to it"),
    "a factor that is too large": ("modelopt-nvfp4", {f"{AT}.weight_scale_2": lambda t: t * 0 + 1e36}, {},
                                   r"k_proj\.weight_scale_2 has a scale of infinity or close to it"),
    "a size without an end": ("awq", {}, {"group_size": 10**400}, r"group_size must be an integer; got 1[0]{199}\.\.\.$"),
    "NaN in fp8": ("fp8-block", {f"{AT}.weight": byte(0x7F)}, {}, r"model\.layers\.1\.self_attn\.k_proj\.weight has a NaN"),
    "a scale of an expert": ("ct-int4-moe", {f"{EXPERT}.weight_scale": filled(float("nan"))}, {},
                             r"^model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight_scale has a scale of NaN"),
    "no regular expression": ("ct-int4", {}, {"ignore": ["re:["]}, r"ignore: '\[' is not a regular expression .*unterminated"),
    "none by GPTQ": ("gptq", {}, {"dynamic": {"+:(": {}}}, r"dynamic: '\(' is not a regular expression"),
    "a long pattern": ("ct-int4", {}, {"ignore": ["re:" + "a" * 3000]}, r"ignore: 'aaa.*must have at most 2,000 characters"),
    "a part of a class's name": ("ct-int4", {}, {"config_groups": {"a": {"targets": ["Lin"], "weights": {"num_bits": 4,
                                 "group_size": 64}}}}, r"unknown \(42\): "),
    "groups in a list": ("ct-int4", {}, {"config_groups": [1]}, r"config_groups must be an object; got \[1\]"),
    "a group in a word": ("ct-int4", {}, {"config_groups": {"a": "x"}}, r"quantization_config: a must be an object; got 'x'"),
    "weights in a word": ("ct-int4", {}, {"config_groups": {"a": {"weights": "int4"}}}, r"weights must be an object"),
    "activations in a list": ("ct-int4", {}, {"config_groups": {"a": {"weights": {}, "input_activations": [1]}}},
                              r"input_activations must be an object; got \[1\]"),
    "bits in a word": ("ct-w8a8", {}, {"config_groups": {"a": {"weights": {}, "input_activations": {"num_bits": "8"}}}},
                       r"num_bits must be an integer; got '8'"),
    "a broken number of bits": ("ct-int4", {}, {"config_groups": {"a": {"weights": {"num_bits": 4.0}}}}, r"integer; got 4\.0"),
    "symmetric in a word": ("ct-int4", {}, {"config_groups": {"a": {"weights": {"symmetric": "false"}}}},
                            r"symmetric must be true or false; got 'false'"),
    "sparsity in a list": ("ct-int4", {}, {"sparsity_config": ["2:4"]}, r"sparsity_config must be an object"),
    "a transform in a word": ("ct-int4", {}, {"transform_config": "hadamard"}, r"transform_config must be an object"),
    "a block of no digit": ("fp8-block", {}, {"weight_block_size": ["²", 128]}, r"a block must be two positive integers"),
    "layers in a list": ("modelopt-fp8", {}, {"quantized_layers": [1]}, r"quantized_layers must be an object; got \[1\]"),
    "a layer of 5": ("modelopt-fp8", {}, {"quantized_layers": {"a": 5}}, r"quantized_layers: a must be an object; got 5"),
    "dynamic of 5": ("gptq", {}, {"dynamic": {"+:.*": 5}}, r"dynamic: \+:\.\* must be an object; got 5"),
    "modules of 5": ("gptq", {}, {"modules_in_block_to_quantize": [[5]]}, r"modules_in_block_to_quantize must be a list"),
    "double in a word": ("bnb-nf4", {}, {"bnb_4bit_use_double_quant": "no"}, r"double_quant must be true or false"),
    "state": ("bnb-nf4", {f"{AT}.weight.quant_state.bitsandbytes__nf4": lambda t: torch.tensor(list(b'{"blocksize": 128}'),
              dtype=torch.uint8)}, {}, r"blocksize must be 64; got 128"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_details_are_named(checkpoint, tmp_path, what):
    scheme, tensors, config, message = WRONG[what]
    directory = damaged(checkpoint(scheme), tmp_path / "damaged", tensors, config)
    with pytest.raises(ModelError, match=message):
        load(directory, KEEPS)


@pytest.mark.parametrize(
    ("scheme", "config", "field"),
    [
        ("ct-int4", {"ignore": ["re:.*gate$", "re:([a-z._0-9]+)+X"]}, "ignore"),
        ("gptq", {"dynamic": {"-:([a-z._0-9]+)+X": {}}}, "dynamic"),
    ],
)
def test_patterns_that_take_forever_are_refused(checkpoint, tmp_path, monkeypatch, scheme, config, field):
    monkeypatch.setattr("quire.layers.quant.patterns.MATCH_LIMIT_S", 0.5)
    directory = damaged(checkpoint(scheme), tmp_path / "slow", config=config)
    with pytest.raises(
        ModelError, match=rf"{field}: pattern '\(\[a-z\._0-9\]\+\)\+X' takes longer than [0-9.]+ s for model\.layers"
    ):
        load(directory, KEEPS)


def test_patterns_choose_modules(checkpoint, tmp_path):
    """Of GPTQ: what is said of one that fits is left out, or stored in another way."""
    source = checkpoint("gptq")
    values = load_file(source.parent / "floats" / "model.safetensors")
    directory = damaged(source, tmp_path / "some", config={"bits": 8, "dynamic": {"-:.*k_proj": {}, "+:.*proj$": {"bits": 4}}})
    found = load_file(directory / "model.safetensors")
    found = {name: tensor for name, tensor in found.items() if ".k_proj." not in name}
    found |= {name: tensor for name, tensor in values.items() if ".k_proj." in name}
    save_file(found, directory / "model.safetensors")
    got, wanted = (Sequences(each, 1, 40).step([(0, FIRST)])[0] for each in (load(directory, KEEPS), floats(source)))
    assert (got - wanted).abs().max() < 1e-3


def test_an_order_in_the_files_is_followed_whatever_is_said(checkpoint, tmp_path):
    source = checkpoint("gptq-act-order")
    directory = damaged(source, tmp_path / "silent", config={"desc_act": False})
    got, wanted = (Sequences(each, 1, 40).step([(0, FIRST)])[0] for each in (load(directory, KEEPS), floats(source)))
    assert (got - wanted).abs().max() < 1e-3
    facts = read_facts(resolve_model(directory))
    model = build_model(facts)
    shard(model, Position(0, 2), Alone())
    with pytest.raises(ModelError, match=r"o_proj: act-order groups \(g_idx\) cannot be divided"):
        load_weights(model, facts, device="cpu", dtype="float32", quantization=facts.quantization, keeps=KEEPS)


@pytest.mark.parametrize("what", ["a scale below 0", "an unused scale of 0", "another table"])
def test_an_engine_does_not_start_with_them(checkpoint, tmp_path, what):
    scheme, tensors, config, message = WRONG[what]
    directory = damaged(checkpoint(scheme), tmp_path / "damaged", tensors, config)
    with pytest.raises(ModelError, match=message):
        LLM(str(directory), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64)


@pytest.mark.parametrize("scheme", ["awq", "gptq", "ct-int4", "ct-w8a8"])
def test_scales_of_whole_numbers_may_be_below_0(checkpoint, tmp_path, scheme):
    """So some tools write them where the largest number of a group is below 0, or is not."""
    name = f"{AT}.scales" if scheme in ("awq", "gptq") else f"{AT}.weight_scale"
    model = load(damaged(checkpoint(scheme), tmp_path / "below", {name: torch.neg}), KEEPS)
    matrix, wanted = model.layers[1].self_attn.qkv.method.matrix.dequantize(), floats(checkpoint(scheme))
    expected = wanted.layers[1].self_attn.qkv.weight.clone()
    expected[128:192] *= -1
    torch.testing.assert_close(matrix, expected)


def test_an_expert_without_an_unused_scale(checkpoint, tmp_path):
    directory = damaged(checkpoint("modelopt-nvfp4-moe"), tmp_path / "without", {f"{EXPERT}.input_scale": lambda t: None})
    assert isinstance(load(directory, KEEPS).layers[0].mlp.experts.method, StoredExperts)


def test_an_output_of_zeros_has_no_scale(checkpoint, tmp_path):
    """bitsandbytes stores the largest number of each."""
    tensors = {f"{AT}.weight": lambda t: t * (torch.arange(len(t)) != 3)[:, None], f"{AT}.SCB": filled(0.0)}
    model = load(damaged(checkpoint("bnb-int8"), tmp_path / "zeros", tensors))
    assert not model.layers[1].self_attn.qkv.weight[128 + 3].any()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("quantization_config", 5, r"quantization_config must be an object, got 5"),
        ("quantization_config", [], r"quantization_config must be an object, got \[\]"),
        ("compression_config", "awq", r"compression_config must be an object, got 'awq'"),
        ("quantization_config", {"quant_method": None, "config_groups": {}}, "quant_method must be a string, got None"),
        ("quantization_config", {"quant_method": ["awq"]}, r"quant_method must be a string, got \['awq'\]"),
        ("hf_quant_config.json", {"quantization": 5}, r"hf_quant_config\.json: quantization must be an object, got 5"),
        ("quantize_config.json", {"bits": "x"}, r"bits must be an integer; got 'x'"),
    ],
)
def test_what_is_of_a_wrong_kind_is_not_absent(checkpoint, tmp_path, name, content, message):
    floating = checkpoint("awq").parent / "floats"
    settings = json.loads((floating / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(floating / "model.safetensors")
    if name.endswith(".json"):
        (tmp_path / name).write_text(json.dumps(content))
    else:
        settings[name] = content
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "scheme",
    ["awq", "gptq", "gptq-8", "gptq-asymmetric", "ct-int4-asymmetric", "ct-several", "ct-w8a8", "fp8-tensor", "modelopt-nvfp4"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_their_shares(checkpoint, scheme, size):
    """Outputs of every part, or inputs."""
    directory = checkpoint(scheme)
    facts, whole = read_facts(resolve_model(directory)), floats(directory)
    for rank in range(size):
        model = build_model(facts)
        shard(model, Position(rank, size), Alone(), find_grain(facts.quantization))
        load_weights(model, facts, device="cpu", dtype="float32", quantization=facts.quantization, keeps=KEEPS)
        for (path, layer), full in zip(model.named_modules(), whole.modules(), strict=True):
            if isinstance(layer, Linear):
                sections = zip(full.weight.split(layer.sections), layer.local_outputs, strict=True)
                rows = torch.cat([part[some.start : some.stop] for part, some in sections])
                expected = rows[:, layer.local_inputs.start : layer.local_inputs.stop]
                got = layer.method.matrix.dequantize() if isinstance(layer.method, StoredLinear) else layer.weight
                assert torch.allclose(got, expected, atol=1e-6), path


class Alone:
    """Of ranks that are never run."""

    def add(self, part):
        return part

    def join(self, part, total):
        return part


@pytest.mark.parametrize(
    ("scheme", "size", "message"),
    [
        ("gptq-act-order", 2, r"o_proj: act-order groups \(desc_act\) cannot be divided"),
        ("ct-int4-act-order", 2, r"o_proj: act-order groups \(weight_g_idx\) cannot be divided"),
        ("ct-int4", 3, r"o_proj.weight_scale: 0 to 32 of 128 inputs are not whole groups of 64"),  # a head
        ("ct-int4", 4, r"o_proj.weight_scale: 0 to 32 of 128 inputs are not whole groups of 64"),
        ("awq-moe", 4, r"down_proj.scales: 0 to 16 of 64 inputs are not whole groups of 32"),  # two groups for four
        ("fp8-block", 2, r"q_proj.weight_scale_inv: 0 to 64 of 128 outputs are not whole groups of 128"),
        ("bnb-nf4", 2, r"o_proj.weight is stored in row-major order and cannot be divided along its inputs"),
    ],
)
def test_groups_are_not_divided(checkpoint, scheme, size, message):
    facts = read_facts(resolve_model(checkpoint(scheme)))
    model = build_model(facts)
    shard(model, Position(0, size), Alone(), find_grain(facts.quantization))
    with pytest.raises(ModelError, match=message):
        load_weights(model, facts, device="cpu", dtype="float32", quantization=facts.quantization, keeps=KEEPS)


def test_scales_of_a_cache_of_8_bits_are_left_aside(checkpoint, tmp_path, caplog):
    caplog.set_level("INFO", "quire")
    source = checkpoint("fp8-tensor")
    directory = damaged(source, tmp_path / "more", config={"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    found = load_file(directory / "model.safetensors")
    found |= {
        f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_proj.v_scale", "k_proj.output_scale")
    }
    save_file(found, directory / "model.safetensors")
    got, wanted = (Sequences(each, 1, 40).step([(0, FIRST)])[0] for each in (load(directory, KEEPS), floats(source)))
    assert (got - wanted).abs().max() < 1e-3
    assert caplog.text.count("KV cache scales are unused: they require kv_cache_dtype='fp8'") == 1


@pytest.mark.parametrize(
    ("scheme", "asked", "message"),
    [
        ("awq", "gptq", r"quantization='gptq', but the checkpoint has 'awq'"),
        ("awq", "marlin", r"quantization='marlin' is unknown; these are: gguf, auto_awq"),
        ("awq", "torchao", r"quantization='torchao' is not supported; these are: gguf, auto_awq"),
        ("awq", "gguf", r"does not fit files that are not GGUF"),
        (None, "awq", r"the checkpoint is not quantized; leave it out, or use fp8"),
    ],
)
def test_an_argument_must_agree_with_the_files(checkpoint, scheme, asked, message):
    directory = checkpoint(scheme or "awq")
    with pytest.raises(ConfigError, match=message):
        LLM(
            str(directory if scheme else directory.parent / "floats"),
            device="cpu",
            skip_tokenizer_init=True,
            quantization=asked,
        )


def test_other_names_of_a_method_and_of_the_configuration(checkpoint, tmp_path):
    """In a nested configuration, under an older name, and beside config.json."""
    source = checkpoint("ct-int4")
    for place in ("compression_config", "text_config"):
        directory = damaged(source, tmp_path / place)
        settings = json.loads((directory / "config.json").read_text())
        config = settings.pop("quantization_config")
        settings |= {"compression_config": config}
        if place == "text_config":
            settings = {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "text_config": settings,
                "quantization_config": config,
            }
        (directory / "config.json").write_text(json.dumps(settings))
        assert read_facts(resolve_model(directory)).quantization.method == "compressed-tensors"
    aside = damaged(checkpoint("awq"), tmp_path / "aside")
    settings = json.loads((aside / "config.json").read_text())
    config = settings.pop("quantization_config")
    (aside / "config.json").write_text(json.dumps(settings))
    (aside / "quant_config.json").write_text(
        json.dumps({"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True})
    )
    assert config["quant_method"] == read_facts(resolve_model(aside)).quantization.method
    assert isinstance(load(aside, KEEPS).layers[0].mlp.down_proj.method, StoredLinear)


def test_random_weights_in_a_scheme(checkpoint):
    """For measuring: what the configuration says is made up."""
    for scheme in ("awq", "ct-several", "fp8-block-moe", "fp8-tensor", "modelopt-nvfp4", "bnb-nf4-nested", "bnb-int8"):
        facts = read_facts(resolve_model(checkpoint(scheme)))
        model = build_model(facts)
        load_weights(
            model, facts, device="cpu", dtype="float32", load_format="dummy", quantization=facts.quantization, keeps=KEEPS
        )
        assert Sequences(model, 1, 40).step([(0, FIRST)])[0].isfinite().all()
        assert isinstance(model.layers[0].self_attn.o_proj.method, StoredLinear)


@pytest.mark.parametrize("scheme", ["awq", "ct-w8a8"])
def test_quantized_matrices_are_parameters_too(checkpoint, scheme):
    """`describe_rank` counts the model's parameters, also those that are stored in 4 or 8 bits."""
    counts = set()
    for directory in (checkpoint(scheme), checkpoint(scheme).parent / "floats"):
        llm = LLM(str(directory), device="cpu", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20)
        counts.add(llm.collective_rpc("describe_rank")[0]["parameters"])
        llm.llm_engine.shutdown()
    [count] = counts
    assert count == sum(values.numel() for values in load_file(directory / "model.safetensors").values())
