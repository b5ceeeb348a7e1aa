"""Recurrent families, Granite with experts and gpt-oss, told as llama.cpp's converter tells them: the tokens and
log-probabilities of the original, offline and served."""

import re
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from family import Family
from gguf_files import write_gguf
from oracle import Sequences, make_checkpoint, open_reference
from quire import LLM, SamplingParams
from quire.config.devices import KEEPS
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.layers.moe import Experts
from quire.layers.quant.gguf import BlocksExperts
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.types.errors import ModelError
from recurrent_families import GRANITE, RECURRENT
from serving import NAME, Running

PROMPTS = [torch.randint(3, 199, (count,), generator=torch.Generator().manual_seed(count)).tolist() for count in (19, 5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
SCALES = {"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 3.0, "attention.scale": 0.3}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE_MOE = {
    "attention_multiplier": 0.3, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, **MOE,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32, "truncate": False}
GPT_OSS = {
    "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "sliding_window": 6, **MOE, "rope_parameters": YARN,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    architecture: str
    family: Family
    fields: dict[str, Any] = field(default_factory=dict)
    pairs: bool = False


SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 8}
HEADS = {**SSM, "ssm.time_step_rank": 6, "ssm.group_count": RECURRENT["mamba2"].settings["n_groups"]}
ALONE = {"attention.head_count": 0, "feed_forward_length": 0, "context_length": 1 << 20}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
SOME = {"attention.head_count_kv": [0, 2, 0]}
NOPE = {"rope.scaling.finetuned": False, "context_length": 1 << 20}
CASES = {
    "gpt-oss": Case(
        "gpt-oss", Family("GptOssConfig", "GptOssForCausalLM", GPT_OSS),
        {"attention.sliding_window": 6, "attention.key_length": 16, "attention.value_length": 16, **EXPERTS,
         "expert_feed_forward_length": 32, "rope.dimension_count": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 32},
    ),
    "granite-moe": Case(
        "granitemoe", Family("GraniteMoeConfig", "GraniteMoeForCausalLM", GRANITE_MOE), {**SCALES, **EXPERTS}, True
    ),
    "granite-moe-shared": Case(
        "granitemoe",
        Family("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", {**GRANITE_MOE, "shared_intermediate_size": 32}),
        {**SCALES, **EXPERTS, "expert_shared_feed_forward_length": 32}, True,
    ),
    "granite-hybrid": Case(
        "granitehybrid", RECURRENT["granite-hybrid"],
        {**HEADS, **SOME, **SCALES, **NOPE, **EXPERTS, "expert_shared_feed_forward_length": 32}, True,
    ),
    "granite-hybrid-dense": Case(
        "granitehybrid",
        Family("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
               {**GRANITE, "num_local_experts": 0, "intermediate_size": 32, "position_embedding_type": "rope"}),
        {**HEADS, **SOME, **SCALES, "rope.scaling.finetuned": True, "expert_count": 0}, True,
    ),
    "bamba": Case("granitehybrid", RECURRENT["bamba"], {**HEADS, **SOME, "rope.dimension_count": 4}, True),
    "falcon-h1": Case("falcon-h1", RECURRENT["falcon-h1"], {**HEADS, "attention.key_length": 8}),
    "falcon-h1-no-norm": Case("falcon-h1", RECURRENT["falcon-h1-no-norm"], {**HEADS, "attention.key_length": 8}),
    "jamba": Case("jamba", RECURRENT["jamba"], {**SSM, **SOME, **EXPERTS, "ssm.time_step_rank": 5}),
    "lfm2": Case("lfm2", RECURRENT["lfm2"], {**SOME, "shortconv.l_cache": 3, "feed_forward_length": 64}),
    "mamba": Case("mamba", Family("MambaConfig", "MambaForCausalLM", {**RECURRENT["mamba"].settings, "use_bias": False}),
                  {**ALONE, **SSM, "ssm.time_step_rank": 3}),
    "falcon-mamba": Case("mamba", RECURRENT["falcon-mamba"],
                         {**ALONE, **SSM, "ssm.time_step_rank": 3, "ssm.dt_b_c_rms": True}),
    "mamba2": Case("mamba2", RECURRENT["mamba2"], {**ALONE, **HEADS}),
}  # fmt: skip
CASES["falcon-h1"].family.settings["mamba_norm_before_gate"] = False


def multiplied(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """What Falcon-H1 multiplies by, in its matrices."""
    inner, each = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    before = config["attention_in_multiplier"]
    if "in_proj" in name:
        sizes, scales = (inner, inner, each, each, config["mamba_n_heads"]), config["ssm_multipliers"]
        factors = torch.cat([torch.full((size, 1), scale) for size, scale in zip(sizes, scales, strict=True)])
        return tensor * config["ssm_in_multiplier"] * factors
    scales = {
        "down_proj": config["mlp_multipliers"][1], "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * before, "q_proj": before, "v_proj": before,
        "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    return tensor * next((scale for part, scale in scales.items() if part in name), 1.0)


def split(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What files of llama.cpp have apart, by names that it knows."""
    if "experts.gate_up_proj" in name:
        ends = ".bias" if name.endswith("_bias") else ".weight"
        tensor = tensor if ends == ".bias" else tensor.transpose(-1, -2)
        stem = name.partition("gate_up_proj")[0]
        return {f"{stem}gate_proj{ends}": tensor[:, 0::2], f"{stem}up_proj{ends}": tensor[:, 1::2]}
    if re.search(r"experts\.down_proj", name):
        bias = name.endswith("_bias")
        stem = name.removesuffix("_bias")
        return {f"{stem}.bias": tensor} if bias else {f"{stem}.weight": tensor.transpose(-1, -2)}
    if match := re.search(r"(.*)\.(block_sparse_moe|shared_mlp)\.(input|output)_linear\.weight", name):
        layer, kind, which = match.groups()
        names = ("gate_proj", "up_proj") if which == "input" else ("down_proj",)
        where = "mlp.experts" if kind == "block_sparse_moe" else "mlp.shared_expert"
        return {
            f"{layer}.{where}.{part}.weight": half for part, half in zip(names, tensor.chunk(len(names), dim=-2), strict=True)
        }
    return {name: tensor}


def convert(case: Case, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As convert_hf_to_gguf.py: its names, and what it does to values."""
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == case.architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for hf, whole in tensors.items():
        for name, tensor in split(hf, whole).items():
            if match := re.search(r"\.experts\.(\d+)\.", name):
                experts.setdefault(name.replace(match[0], ".experts."), {})[int(match[1])] = tensor
                continue
            if case.pairs and (match := re.search(r"\.([qk])_proj\.weight", name)):
                count = config["num_attention_heads"] if match[1] == "q" else config["num_key_value_heads"]
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            found |= told(case, config, names, name, tensor)
    for name, several in experts.items():
        stack = torch.stack([several[index] for index in range(len(several))])
        found |= told(case, config, names, name.replace("feed_forward", "mlp"), stack)
    return found


def told(case: Case, config: dict[str, Any], names: Any, name: str, tensor: torch.Tensor) -> dict[str, Any]:
    if case.architecture == "falcon-h1":
        tensor = multiplied(name, tensor, config)
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    if re.search(r"conv1d\.weight|conv\.conv\.weight", name):
        tensor = tensor.squeeze()
    if re.search(r"\.(A_log|D)$", name) and tensor.ndim == 1 and case.architecture not in ("mamba", "jamba"):
        tensor = tensor[:, None]
    if re.search(r"\.(mamba|mixer)\.norm\.weight$", name):
        tensor = tensor.view(HEADS["ssm.group_count"], -1)
    name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
    name = name + ".weight" if name.endswith("sinks") else name
    theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if theirs is None and "shared_expert" in name and config.get("num_local_experts", 0) == 0:
        theirs = names.get_name(name.replace("mlp.shared_expert", "mlp"), try_suffixes=(".weight",))
    assert theirs is not None, name
    values = tensor.float().contiguous().numpy()
    if "exps.weight" in theirs and case.architecture == "gpt-oss":
        return {theirs: (gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4), gguf.GGMLQuantizationType.MXFP4)}
    return {theirs: values}


def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's experts as blocks of 4 bits have them."""
    kind = gguf.GGMLQuantizationType.MXFP4
    for name, tensor in tensors.items():
        if "experts" in name and not name.endswith("_bias"):
            blocks = gguf.quants.quantize(tensor.transpose(-1, -2).contiguous().numpy(), kind)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind)).transpose(-1, -2).contiguous()
    return tensors


def fields_of(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads") or 1
    rope = config.get("rope_parameters") or {}
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": 128,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or 0,
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or 0,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-5)),
        "rope.freq_base": float(rope.get("rope_theta", 1e4)),
        "rope.dimension_count": config["hidden_size"] // heads,
        **case.fields,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By name: a file, and transformers' model."""

    def make(name):
        if name not in found:
            case, directory = CASES[name], tmp_path_factory.mktemp(name)
            make_checkpoint(case.family, directory)
            reference = open_reference(directory)
            config = reference.config.to_dict()
            tensors = load_file(directory / "model.safetensors")
            if case.architecture == "gpt-oss":
                tensors = rounded(tensors)
                reference.load_state_dict(tensors, strict=False)
            if config["tie_word_embeddings"]:
                tensors.pop("lm_head.weight", None)
            path = directory / "tiny.gguf"
            write_gguf(
                path, architecture=case.architecture, fields=fields_of(case, config), tensors=convert(case, config, tensors)
            )
            found[name] = path, reference
        return found[name]

    found = {}
    return make


def engine(path, **more):
    return LLM(
        str(path), skip_tokenizer_init=True, device="cpu", max_model_len=64, max_num_batched_tokens=8, block_size=4,
        max_num_seqs=4, kv_cache_memory_bytes=1 << 22, **more,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_of_the_original(made, name):
    path, reference = made(name)
    for prompt, output in zip(PROMPTS, engine(path).generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        drawn = output.outputs[0]
        ids = prompt + list(drawn.token_ids)
        with torch.inference_mode():
            expected = reference(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert expected.argmax(-1).tolist() == list(drawn.token_ids)
        got = [step[token].logprob for step, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
        np.testing.assert_allclose(got, expected.max(-1).values, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "granite-hybrid"])
def test_served(made, name):
    path, reference = made(name)
    running = Running(path, skip_tokenizer_init=True, max_model_len=64, max_num_batched_tokens=16, dtype="float32")
    try:
        body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = running.http.post("/v1/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
    finally:
        running.close()
    ids = list(PROMPTS[0])
    for _ in range(4):
        with torch.inference_mode():
            ids.append(int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert answer.json()["choices"][0]["token_ids"] == ids[len(PROMPTS[0]) :]


def test_experts_of_4_bits_where_a_device_keeps_them(made):
    """As on a GPU: the blocks become its form, with the same values."""
    facts = read_facts(resolve_model(made("gpt-oss")[0]))
    found = []
    for keeps in (KEEPS["cuda"], frozenset()):
        model = build_model(facts, "quire")
        load_weights(model, facts, device="cpu", dtype="float32", keep_quantized=bool(keeps), keeps=keeps)
        kept = {isinstance(layer.method, BlocksExperts) for layer in model.modules() if isinstance(layer, Experts)}
        assert kept == {bool(keeps)}
        found.append(Sequences(model, 1, 19).step([(0, PROMPTS[0])])[0])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu(made):
    facts = read_facts(resolve_model(made("gpt-oss")[0]))
    found = []
    for keeps in (KEEPS["cuda"], frozenset()):
        model = build_model(facts, "quire")
        load_weights(model, facts, device="cuda", dtype="bfloat16", keep_quantized=bool(keeps), keeps=keeps)
        found.append(Sequences(model, 1, 19, device="cuda").step([(0, PROMPTS[0])])[0].float())
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


def test_divided_among_ranks(made):
    """What is stored in another shape is cut as the original is."""
    path, _ = made("granite-hybrid")
    [output] = engine(path, tensor_parallel_size=2).generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    [whole] = engine(path).generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("granite-hybrid", {"attention.head_count_kv": [0, 2]}, "head_count_kv must be a list of 3 integers"),
        ("granite-hybrid", {"attention.head_count_kv": [0, 2, 1]}, "otherwise one and the same"),
        ("granite-hybrid", {"ssm.time_step_rank": 7}, "ssm.inner_size 96 is no multiple of the 7 heads"),
        ("mamba", {"ssm.inner_size": 100}, "ssm.inner_size 100 is no multiple of embedding_length 48"),
        ("gpt-oss", {"expert_count": [4, 4]}, r"gpt-oss.expert_count must be a positive integer, got \[4, 4\]"),
        ("mamba2", {"ssm.state_size": 0}, "mamba2.ssm.state_size must be a positive integer, got 0"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0]}, "layers .* attend, which is no regular distance"),
    ],
)
def test_files_that_cannot_be(tmp_path, name, fields, told):
    config = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    tensors = {"token_embd.weight": np.zeros((199, 48), np.float32)}
    case = CASES[name]
    path = tmp_path / "broken.gguf"
    write_gguf(path, architecture=case.architecture, fields={**fields_of(case, config), **fields}, tensors=tensors)
    with pytest.raises(ModelError, match=told):
        read_facts(resolve_model(path))
