"""Tiny random checkpoints of encoder-only families, made by transformers, and what transformers makes of texts."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56,
    "max_position_embeddings": 96,
}  # fmt: skip
DISTIL = {"vocab_size": 97, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 56, "max_position_embeddings": 96}
MODERN = {**SIZES, "local_attention": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
          "sep_token_id": 2}  # fmt: skip
LONG = {**SIZES, "max_position_embeddings": 300}  # farther than the last bucket of MPNet's distances


@dataclass(frozen=True)
class Encoder:
    model: str  # transformers' class
    config: str
    options: dict[str, Any]


ENCODERS = {
    "BERT": Encoder("BertModel", "BertConfig", SIZES),
    "BERT, cross-encoder": Encoder("BertForSequenceClassification", "BertConfig", {**SIZES, "num_labels": 1}),
    "BERT, tokens": Encoder("BertForTokenClassification", "BertConfig", {**SIZES, "num_labels": 5}),
    "RoBERTa": Encoder("RobertaModel", "RobertaConfig", {**SIZES, "pad_token_id": 1}),
    "XLM-R, classes": Encoder("XLMRobertaForSequenceClassification", "XLMRobertaConfig", {**SIZES, "num_labels": 3}),
    "DistilBERT": Encoder("DistilBertModel", "DistilBertConfig", DISTIL),
    "DistilBERT, classes": Encoder("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL),
    "MPNet": Encoder("MPNetModel", "MPNetConfig", LONG),
    "MPNet, classes": Encoder("MPNetForSequenceClassification", "MPNetConfig", {**SIZES, "num_labels": 2}),
    "ModernBERT": Encoder("ModernBertModel", "ModernBertConfig", MODERN),
    "ModernBERT, classes": Encoder("ModernBertForSequenceClassification", "ModernBertConfig", {**MODERN, "num_labels": 3}),
    "ModernBERT, tokens": Encoder("ModernBertForTokenClassification", "ModernBertConfig", {**MODERN, "num_labels": 3}),
    "Nomic": Encoder("NomicBertModel", "NomicBertConfig", SIZES),
    "GTE": Encoder("GteModel", "GteConfig", {**SIZES, "type_vocab_size": 0}),
    "GTE, classes": Encoder("GteForSequenceClassification", "GteConfig", {**SIZES, "num_labels": 2}),
    "Jina v3": Encoder("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", SIZES),
    "Jina v3, classes": Encoder("JinaEmbeddingsV3ForSequenceClassification", "JinaEmbeddingsV3Config", SIZES),
}


def save_encoder(family: Encoder, folder: Path) -> Any:
    """Save a random checkpoint to `folder` and return transformers' model of it."""
    import transformers

    torch.manual_seed(7)
    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.options)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.2)
        else:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def states_of(model: Any, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """[tokens, hidden_size] the last hidden states of one text."""
    base = getattr(model, model.base_model_prefix, model)
    return base(**_inputs(ids, types)).last_hidden_state[0]


@torch.no_grad()
def logits_of(model: Any, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """[labels], or [tokens, labels], of one text."""
    return model(**_inputs(ids, types)).logits[0]


def _inputs(ids: list[int], types: list[int] | None) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([ids]), **({} if types is None else {"token_type_ids": torch.tensor([types])})}


def random_texts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 97, (count,), generator=generator).tolist() for count in lengths]


GGUF_LAYER = {
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm", "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output", "norm1": "attn_output_norm", "norm2": "layer_output_norm", "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate", "mlp.fc2": "ffn_down",
}  # fmt: skip
GGUF_TOP = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm", "emb_ln": "token_embd_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """What llama.cpp's converter calls a tensor."""
    path, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"encoder\.layers?\.(\d+)\.(.+)", path)
    return f"{GGUF_TOP[path]}.{kind}" if layer is None else f"blk.{layer[1]}.{GGUF_LAYER[layer[2]]}.{kind}"
