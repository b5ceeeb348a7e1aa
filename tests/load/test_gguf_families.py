"""Checkpoints told as llama.cpp's converter does, by the names that the gguf package has for each architecture: the logits are
those of the original."""

import re
from dataclasses import dataclass, field
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from family import Family
from gguf_files import write_gguf
from more_families import GRANITE, MORE
from oracle import Sequences, make_checkpoint, open_reference
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.load.load import load_weights
from quire.models.registry import build_model

IDS = torch.randint(3, 199, (24,), generator=torch.Generator().manual_seed(0)).tolist()
LLAMA = Family("LlamaConfig", "LlamaForCausalLM")


@dataclass(frozen=True)
class Case:
    family: Family
    pairs: bool = False  # q and k rows are reordered
    fields: dict[str, Any] = field(default_factory=dict)


SCALES = {"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 3.0}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
GLM_MOE = {"attention.key_length": 16, "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24,
           "leading_dense_block_count": 1, "expert_gating_func": 2}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
CASES = {
    "granite": Case(Family("GraniteConfig", "GraniteForCausalLM", GRANITE), True, {**SCALES, "attention.scale": 0.3}),
    "minicpm": Case(Family("GraniteConfig", "GraniteForCausalLM", {**GRANITE, "attention_multiplier": 8**-0.5}), True, SCALES),
    "internlm2": Case(LLAMA, True),
    "arcee": Case(Family("ArceeConfig", "ArceeForCausalLM"), True),
    "smollm3": Case(Family("SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 4, "use_sliding_window": False}), True),
    "ernie4_5": Case(Family("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 8})),
    "olmo2": Case(Family("Olmo2Config", "Olmo2ForCausalLM")),
    "command-r": Case(MORE["cohere"], fields={"logit_scale": 0.5, **LAYER_NORM}),
    "cohere2": Case(
        Family("Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 7, "num_hidden_layers": 4}),
        fields={"logit_scale": 0.0625, **LAYER_NORM, "attention.sliding_window": 7},
    ),
    "starcoder2": Case(Family("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": None}), fields=LAYER_NORM),
    "falcon": Case(MORE["falcon"], fields=LAYER_NORM),
    "falcon new": Case(MORE["falcon-new"], fields=LAYER_NORM),
    "olmoe": Case(Family("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2})),
    "qwen2moe": Case(
        Family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
               "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}),
    ),
    "exaone": Case(MORE["exaone"]),
    "exaone4": Case(
        MORE["exaone4"],
        fields={"attention.sliding_window": 6, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "exaone4 without windows": Case(
        Family("Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": ..., "layer_types": ["full_attention"] * 3})
    ),
    "glm4": Case(MORE["glm4"], fields={"attention.key_length": 16, "rope.dimension_count": 8}),
    "glm4moe": Case(
        MORE["glm4-moe-groups"],
        fields={**GLM_MOE, "block_count": 4, "nextn_predict_layers": 1, "expert_shared_count": 2, "expert_group_count": 4,
                "expert_group_used_count": 2, "expert_weights_scale": 1.5, "rope.dimension_count": 8},
    ),
    "dots1": Case(
        MORE["dots1"],
        fields={**GLM_MOE, "expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": False},
    ),
    "minimax-m2": Case(
        MORE["minimax-m2"],
        fields={"attention.key_length": 16, "rope.dimension_count": 8, "expert_count": 4, "expert_used_count": 2,
                "expert_feed_forward_length": 80, "expert_gating_func": 2},
    ),
    "hunyuan-moe": Case(
        Family("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
        fields={"attention.key_length": 16, "expert_used_count": 2},
    ),
    "hunyuan-dense": Case(Family("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {"head_dim": 8})),
    "seed_oss": Case(MORE["seed-oss"], fields={"attention.key_length": 16}),
    "olmo2 with windows": Case(
        Family("Olmo3Config", "Olmo3ForCausalLM",
               {"sliding_window": 7, "num_hidden_layers": 4,
                "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
        fields={"attention.sliding_window": 7, "rope.freq_base": 500.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32},
    ),
}  # fmt: skip


def convert(case: Case, name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As convert_hf_to_gguf.py: its names, and what it does to rows."""
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or heads
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for hf, tensor in tensors.items():
        if match := re.search(r"\.experts\.(\d+)\.", hf):
            stacked = hf.replace(match[0], ".experts.")
            experts.setdefault(stacked, {})[int(match[1])] = tensor
            continue
        if case.pairs and re.search(r"\.[qk]_proj\.weight", hf):
            count = heads if ".q_proj." in hf else keys
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if "query_key_value" in hf:
            many = config["num_kv_heads"] if config.get("new_decoder_architecture") else 1
            size = config["hidden_size"] // heads
            groups = tensor.view(many, heads // many + 2, size, -1)
            tensor = torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])
        hf = re.sub(r"e_score_correction_bias$", "e_score_correction.bias", hf)
        if hf.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze()
        found[names.get_name(hf, try_suffixes=(".weight", ".bias"))] = tensor.float().numpy()
    for hf, several in experts.items():
        stack = torch.stack([several[i] for i in range(len(several))])
        found[names.get_name(hf, try_suffixes=(".weight",))] = stack.float().numpy()
    assert None not in found
    return found


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_original(tmp_path, name):
    case, architecture = CASES[name], name.partition(" ")[0]
    make_checkpoint(case.family, tmp_path)
    reference = open_reference(tmp_path)
    config = reference.config.to_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    heads = config["num_attention_heads"]
    if "num_kv_heads" in config:  # Falcon's
        keys = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    else:
        keys = config["num_key_value_heads"]
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": 128,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or config["ffn_hidden_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": keys,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope.freq_base": float(config["rope_parameters"].get("rope_theta", 1e4)),
        "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // heads,
        **case.fields,
    }
    if "num_experts" in config:
        fields |= {"expert_count": config["num_experts"]}
        fields |= {"expert_used_count": config.get("num_experts_per_tok") or fields["expert_used_count"]}
        fields |= {"expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"]}
        fields |= {"expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size") or 0}
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture=architecture, fields=fields, tensors=convert(case, architecture, config, tensors))
    facts = read_facts(resolve_model(path))
    model = build_model(facts, "quire")
    load_weights(model, facts, device="cpu", dtype="float32")
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(Sequences(model, 1, len(IDS)).step([(0, IDS)])[0], expected, atol=5e-5, rtol=1e-4)
