"""Tiny random checkpoints made by transformers, and both engines' logits for the same tokens.

A family is one entry of FAMILIES (those of our own) or FALLBACK (those that transformers runs over our cache): the
architecture, its configuration class and what makes it interesting.
"""

import json
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family import Family
from more_families import MORE
from quire.attn.batch import PLAIN, Batch, GroupView, LoRATokens, Tokens, with_final_tokens
from quire.config.facts import ModelFacts, read_facts
from quire.files.resolve import resolve_model
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.models.registry import build_model, complete_facts
from quire.ops.adapters import tile
from recurrent_families import DELTA, EXPERTS

PAGE_SIZE = 4
ORIGINAL = "original"  # of a checkpoint that was rewritten: where it is kept as transformers wrote it

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}

NOT_IN_OPT = ("intermediate_size", "num_key_value_heads", "initializer_range")
OPT: dict[str, Any] = {**dict.fromkeys(NOT_IN_OPT), "ffn_dim": 80, "word_embed_proj_dim": 48, "init_std": 0.2, "dropout": 0.0}
GPT2: dict[str, Any] = {"intermediate_size": None, "num_key_value_heads": None}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
QWEN3_MOE: dict[str, Any] = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
# before transformers 5.19 the two numbers of the activation are constants of its model, whatever a configuration says
GPT_OSS: dict[str, Any] = (
    {"swiglu_alpha": 1.5, "swiglu_limit": 0.9} if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 19) else {}
)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "llama-biases-tied": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "llama3-rope": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": 9}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen2-some-windows": Family(
        "Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM"),
    "phi3-longrope": Family(
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 32,  # prompts are longer, so that transformers takes the long factors too
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            },
        },
    ),
    "phi3-window-partial": Family(
        "Phi3Config", "Phi3ForCausalLM", {"sliding_window": 11, "partial_rotary_factor": 0.75, "hidden_size": 96}
    ),
    "gemma": Family("GemmaConfig", "GemmaForCausalLM", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma2-untied-biases": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"tie_word_embeddings": False, "attention_bias": True, "attn_logit_softcapping": None, "sliding_window": 9},
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "opt": Family("OPTConfig", "OPTForCausalLM", {**OPT}),
    "opt-norms-after-narrow": Family(
        "OPTConfig", "OPTForCausalLM", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20}
    ),
    "opt-untied-plain": Family(
        "OPTConfig",
        "OPTForCausalLM",
        {
            **OPT,
            "tie_word_embeddings": False,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "word_embed_proj_dim": 32,
        },
    ),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", {**GPT2}),
    "gpt2-odd-scales": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            **GPT2,
            "n_inner": 72,
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
            "activation_function": "relu",
        },
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
            **GPT_OSS,
        },
    ),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window-one-expert": Family(
        "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8}
    ),
    "qwen3-moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-layers": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    ),
    **MORE,
}


# decoders that transformers runs over our cache; of these some are families of our own
FALLBACK: dict[str, Family] = {
    **{
        name: MORE[name]
        for name in (
            *("cohere2", "dots1", "exaone4", "glm4", "gpt-neox", "granite", "olmo2", "qwen2-moe", "smollm3", "vaultgemma"),
        )
    },
    "persimmon": Family("PersimmonConfig", "PersimmonForCausalLM", {"num_key_value_heads": None, "partial_rotary_factor": 0.5}),
    "bitnet": Family("BitNetConfig", "BitNetForCausalLM"),
}


SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES: dict[str, Any] = {"image_size": 8, "patch_size": 4}
CLIP: dict[str, Any] = {"vision_config": {"model_type": "clip_vision_model", **SMALL, **PATCHES}}
SIGLIP: dict[str, Any] = {"vision_config": {"model_type": "siglip_vision_model", **SMALL, **PATCHES}}
PIXTRAL: dict[str, Any] = {"vision_config": {"model_type": "pixtral", "head_dim": 8, **SMALL, **PATCHES}}
QWEN_EYE: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 4}
QWEN3_EYE: dict[str, Any] = {**SMALL, "depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": [0]}
QWEN35_EYE: dict[str, Any] = {**SMALL, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
MROPE35: dict[str, Any] = {**DELTA["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MROPE3: dict[str, Any] = {**MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
EAR: dict[str, Any] = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
}

GEMMA4_TOKENS: dict[str, Any] = {"image_token_id": 190, "video_token_id": 191, "audio_token_id": 192, "boi_token_id": 193,
                                 "eoi_token_id": 194, "boa_token_id": 195, "eoa_token_index": 196}  # fmt: skip
# of which transformers makes none without further packages; their tensors' names are tested in test_checkpoint_names.py
UNMADE = {"Gemma3nForConditionalGeneration"}
# models that also see or hear, by the architecture; the text half of each is a family of ours
COMPOSITES: dict[str, Family] = {
    family.model: family
    for family in (
        Family("DeepseekVLConfig", "DeepseekVLForConditionalGeneration", {}, "llama", SIGLIP),
        Family(
            "Gemma3Config",
            "Gemma3ForConditionalGeneration",
            FAMILIES["gemma3"].settings,
            "gemma3_text",
            SIGLIP | {"mm_tokens_per_image": 4, "image_token_index": 190},
        ),
        Family("Gemma4Config", "Gemma4ForConditionalGeneration", MORE["gemma4"].settings, "gemma4_text",
               {"vision_config": {**SMALL, "patch_size": 4, "head_dim": 8, "num_key_value_heads": 2,
                                  "position_embedding_size": 64}, **GEMMA4_TOKENS}),
        Family("Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration", MORE["gemma4-unified"].settings,
               "gemma4_unified_text",
               {"vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
                "audio_config": {"audio_embed_dim": 16}, **GEMMA4_TOKENS}),
        Family(
            "GotOcr2Config",
            "GotOcr2ForConditionalGeneration",
            {},
            "qwen2",
            {"vision_config": {**SMALL, "mlp_dim": 16, "global_attn_indexes": [0], "output_channels": 8, "image_size": 32}},
        ),
        Family("Idefics2Config", "Idefics2ForConditionalGeneration", {}, "mistral", {"vision_config": {**SMALL, **PATCHES},
               "perceiver_config": {"resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
                                    "resampler_head_dim": 8, "num_key_value_heads": 2}}),
        Family("Idefics3Config", "Idefics3ForConditionalGeneration", {}, "llama", {"vision_config": {**SMALL, **PATCHES}}),
        Family("InternVLConfig", "InternVLForConditionalGeneration", {"head_dim": 16}, "qwen3",
               {"vision_config": {**SMALL, "image_size": [8, 8], "patch_size": [4, 4]}, "tie_word_embeddings": False}),
        Family("LightOnOcrConfig", "LightOnOcrForConditionalGeneration", {"head_dim": 16}, "qwen3", PIXTRAL),
        Family("Llama4Config", "Llama4ForConditionalGeneration", MORE["llama4"].settings, "llama4_text",
               {"vision_config": {**SMALL, **PATCHES, "vision_output_dim": 16, "projector_input_dim": 16,
                                  "projector_output_dim": 16}}),
        Family("LlavaConfig", "LlavaForConditionalGeneration", {}, "llama", CLIP),
        Family("LlavaNextConfig", "LlavaNextForConditionalGeneration", {"sliding_window": 9}, "mistral", CLIP),
        Family("LlavaNextVideoConfig", "LlavaNextVideoForConditionalGeneration", {}, "llama", CLIP),
        Family("LlavaOnevisionConfig", "LlavaOnevisionForConditionalGeneration", {}, "qwen2", SIGLIP),
        Family("Mistral3Config", "Mistral3ForConditionalGeneration", {"sliding_window": None, "head_dim": 16}, "mistral",
               PIXTRAL | {"tie_word_embeddings": False}),
        Family("PaliGemmaConfig", "PaliGemmaForConditionalGeneration", {"head_dim": 16, "num_key_value_heads": 1}, "gemma",
               {**SIGLIP, "projection_dim": 48}),
        Family("Qwen2AudioConfig", "Qwen2AudioForConditionalGeneration", {}, "qwen2", {"audio_config": EAR}),
        Family("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", {"rope_parameters": MROPE}, "qwen2_vl_text",
               {"vision_config": QWEN_EYE}),
        Family("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", {"rope_parameters": MROPE}, "qwen2_5_vl_text",
               {"vision_config": {**SMALL, "depth": 1, "num_heads": 2, "out_hidden_size": 48, "fullatt_block_indexes": [0]}}),
        Family("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", {"head_dim": 16, "rope_parameters": MROPE3}, "qwen3_vl_text",
               {"vision_config": QWEN3_EYE, "tie_word_embeddings": True}),
        Family("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", {**QWEN3_MOE, "rope_parameters": MROPE3},
               "qwen3_vl_moe_text", {"vision_config": QWEN3_EYE}),
        Family("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", {**DELTA, "rope_parameters": MROPE35}, "qwen3_5_text",
               {"vision_config": QWEN35_EYE}),
        Family("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", {**DELTA, **EXPERTS, "rope_parameters": MROPE35},
               "qwen3_5_moe_text", {"vision_config": QWEN35_EYE}),
        Family("SmolVLMConfig", "SmolVLMForConditionalGeneration", {}, "llama", {"vision_config": {**SMALL, **PATCHES}}),
        Family("VideoLlavaConfig", "VideoLlavaForConditionalGeneration", {}, "llama", CLIP),
        Family("VipLlavaConfig", "VipLlavaForConditionalGeneration", {}, "llama", CLIP | {"vision_feature_layers": [0, 0]}),
        Family("VoxtralConfig", "VoxtralForConditionalGeneration", {}, "llama", {"audio_config": {**EAR, **SMALL}}),
    )
}  # fmt: skip


def make_checkpoint(family: Family, directory: Path) -> None:
    import transformers

    stated = (TINY | family.settings).items()
    settings = {name: None if value is ... else value for name, value in stated if value is not None}
    if family.text is not None:
        settings = {"text_config": {"model_type": family.text, **settings}, **family.around}
    config = getattr(transformers, family.config)(**settings)
    torch.manual_seed(7)
    model = find_model(family.model)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # what initializes to a constant must still be able to betray a mistake
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert parameter.isfinite().all(), name
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(0.0, 0.1)
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
        if family.settle is not None:
            family.settle(model)
    model.save_pretrained(directory)
    if family.alias is not None:
        original = directory / ORIGINAL
        original.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(directory / file, original / file)
        save_file(family.alias.tensors(load_file(original / "model.safetensors")), directory / "model.safetensors")
        config = family.alias.config(json.loads((original / "config.json").read_text()))
        (directory / "config.json").write_text(json.dumps(config | {"architectures": [family.alias.architecture]}))


def find_model(name: str) -> Any:
    import transformers

    import repository_models

    return getattr(repository_models, name, None) or getattr(transformers, name)


def open_reference(directory: Path) -> Any:
    """transformers' model of a checkpoint, in float32."""
    directory = directory / ORIGINAL if (directory / ORIGINAL).is_dir() else directory
    config = json.loads((directory / "config.json").read_text())
    # eager is the one that leaves nothing out; but Falcon's adds ALiBi twice
    attention = "sdpa" if config.get("alibi") else "eager"
    kind = find_model(config["architectures"][0])
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


@dataclass(frozen=True)
class Checkpoint:
    """One family's checkpoint, and both engines' models of it."""

    directory: Path
    facts: ModelFacts
    reference: Any
    model: Decoder

    def expected(self, ids: list[int]) -> Tensor:
        """transformers' logits [n, V] of every position."""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids])).logits[0].float()


def open_checkpoint(directory: Path, impl: str = "auto") -> Checkpoint:
    facts = complete_facts(read_facts(resolve_model(directory), lenient=True), impl)
    model = build_model(facts, impl)
    load_weights(model, facts, device="cpu", dtype="float32")
    return Checkpoint(directory, facts, open_reference(directory), model)


class Sequences:
    """A hand-run cache: every sequence has its own scattered pages in every group (one group per layer window)."""

    def __init__(self, model: Decoder, count: int, length: int, page_size: int = PAGE_SIZE, device: str = "cpu") -> None:
        self.model, self.page_size, self.device = model, page_size, device
        windows = [attention.spec.window for attention in model.attentions]
        self.windows = sorted(set(windows), key=str)
        per_row = -(-length // page_size)
        pages = 1 + count * per_row
        shuffled = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.tables = [shuffled.roll(group).view(count, per_row).int().to(device) for group in range(len(self.windows))]
        for attention, window in zip(model.attentions, windows, strict=True):
            spec = attention.spec
            dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
            sides = 2 if spec.latent is None else 1
            kv = torch.full((pages, sides, spec.kv_heads, page_size, spec.head_dim), float("nan"), dtype=dtype, device=device)
            attention.bind(kv, self.windows.index(window))
        for layer in model.recurrents:
            layer.bind(
                *(torch.full((count, *shape), float("nan"), device=device) for shape in (layer.cache.conv, layer.cache.state))
            )
        self.lengths = [0] * count
        self.adapters = [0] * count  # that each sequence asks for
        self.tiled = False  # by kernels

    def step(self, rows: list[tuple[int, list[int]]], kept: list[int] | None = None) -> list[Tensor]:
        """rows of (sequence, next token ids) -> logits [n, V] of each row's every token, or of its last kept[r] ones."""
        ids = [token for _, tokens in rows for token in tokens]
        shapes, positions, start = [], [], 0
        for sequence, tokens in rows:
            begin = self.lengths[sequence]
            self.lengths[sequence] += len(tokens)
            shapes.append((start, len(tokens), self.lengths[sequence]))
            positions += range(begin, begin + len(tokens))
            start += len(tokens)
        at = torch.tensor(positions, device=self.device)
        slots = torch.tensor([sequence for sequence, tokens in rows for _ in tokens], device=self.device)
        groups = []
        for table in self.tables:
            page = table[slots, at // self.page_size].long()
            taken = table[torch.tensor([sequence for sequence, _ in rows], device=self.device)]
            groups.append(GroupView(taken, page * self.page_size + at % self.page_size))
        places = np.array(self.adapters)[slots.cpu()]
        tiles = tile(places, torch.device(self.device)) if self.tiled else None
        batch = Batch(
            ids=torch.tensor(ids, device=self.device),
            positions=at,
            row_starts=torch.tensor([0] + [first + count for first, count, _ in shapes], dtype=torch.int32, device=self.device),
            kv_lengths=torch.tensor([length for _, _, length in shapes], dtype=torch.int32, device=self.device),
            rows=tuple(shapes),
            logit_index=torch.arange(len(ids) if kept is None else sum(kept), device=self.device),
            groups=tuple(groups),
            entries=torch.tensor([sequence for sequence, _ in rows], device=self.device),
            entry_list=tuple(sequence for sequence, _ in rows),
            tokens=Tokens(LoRATokens(places, torch.device(self.device), tiles)) if any(self.adapters) else PLAIN,
        )
        counts = [len(tokens) for _, tokens in rows]
        if kept is not None:
            index = [first + i for (first, count, _), n in zip(shapes, kept, strict=True) for i in range(count - n, count)]
            starts = torch.tensor([0, *np.cumsum(kept)], dtype=torch.int32, device=self.device)
            batch = with_final_tokens(batch, np.array(kept), starts, torch.tensor(index, device=self.device))
            counts = kept
        with torch.inference_mode():
            hidden = self.model(batch)
            logits = self.model.logits(hidden[batch.logit_index], batch.final.tokens)
        assert logits.dtype == torch.float32
        return list(logits.split(counts))


def in_pieces(model: Decoder, first: list[int], second: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of two sequences of 40 tokens that are run together in chunks and single tokens."""
    run = Sequences(model, 2, 40)
    got: tuple[list[Tensor], list[Tensor]] = ([], [])
    for rows in (
        [(0, first[:13])],
        [(0, first[13:21]), (1, second[:30])],
        [(1, second[30:31]), (0, first[21:22])],
        [(0, first[22:23]), (1, second[31:37])],
        [(0, first[23:40]), (1, second[37:38])],
        [(1, second[38:])],
    ):
        for (row, _), logits in zip(rows, run.step(rows), strict=True):
            got[row].append(logits)
    return torch.cat(got[0]), torch.cat(got[1])
