"""Encoder-only models: bidirectional attention without a KV cache. They return vectors, classes and scores, never tokens."""

from typing import Any

from quire.config.families.card import FIELDS, GGUF, Card, Config
from quire.files.gguf import GGUFHeader

_NORM = FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"}
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_BERT = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512}
_ROBERTA = {**_BERT, "type_vocab_size": 1}
_PADDING_POSITIONS = 2  # learned positions that no token of a text has
# where the checkpoint has its layers, and what is beside them
_BERT_NAMES = ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings",
               "embeddings.LayerNorm", "attention.self.query", "attention.self.key", "attention.self.value",
               "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense",
               "output.LayerNorm")  # fmt: skip
_NOMIC_NAMES = ("embeddings.word_embeddings", "embeddings.token_type_embeddings", "emb_ln", "attn.Wqkv", "attn.out_proj",
                "norm1", "norm2", "mlp.fc11", "mlp.fc12", "mlp.fc2")  # fmt: skip


def _architectures(name: str) -> tuple[str, ...]:
    return tuple(name + head for head in _HEADS)


def _usable_positions(config: Config) -> Config:
    """The first positions of RoBERTa's table are not for tokens. Decoders of the same type are run by transformers."""
    rows, classes = config.get("max_position_embeddings"), config.get("architectures")
    decoder = isinstance(classes, list) and str(next(iter(classes), "")).endswith("ForCausalLM")
    if decoder or not isinstance(rows, int):
        return {}
    return {"position_rows": rows, "max_position_embeddings": rows - _PADDING_POSITIONS}


def _modernbert(config: Config) -> Config:
    count, every = config.get("num_hidden_layers"), config.get("global_attn_every_n_layers") or 3
    given = config.get("rope_parameters") or {}
    bases = {"full_attention": config.get("global_rope_theta") or 160000.0,
             "sliding_attention": config.get("local_rope_theta") or 10000.0}  # fmt: skip
    rope = {kind: {"rope_type": "default", "rope_theta": base, **(given.get(kind) or {})} for kind, base in bases.items()}
    types = config.get("layer_types")
    if types is None and isinstance(count, int) and isinstance(every, int):
        types = ["sliding_attention" if index % every else "full_attention" for index in range(count)]
    return {"layer_types": types, "rope_parameters": rope}


def _nomic(config: Config) -> Config:
    """Nomic's own spelling is GPT-2's. Beyond the trained length its frequencies would depend on the text."""
    found: dict[str, Any] = {}
    if config.get("activation_function") == "swiglu":
        found["hidden_act"] = "silu"
    if config.get("n_positions"):
        found["max_position_embeddings"] = min(config["n_positions"], config.get("max_trained_positions") or 2048)
    if config.get("n_embd"):
        found["intermediate_size"] = config.get("n_inner") or 4 * config["n_embd"]
    return found


def _finish_gguf(header: GGUFHeader, config: dict[str, Any]) -> None:
    types = header.tensors.get("token_types.weight")
    config["type_vocab_size"] = 0 if types is None else types.shape[0]


CARDS = (
    Card(
        "BERT", "encoder", "bert:BERT", (*_architectures("Bert"), "HF_ColBERT"), {"bert": _BERT},
        gguf=(
            GGUF("bert", {"hidden_act": "gelu", "without": ("rope",)}, _NORM, _finish_gguf, layers="encoder.layer", root="",
                 names=_BERT_NAMES),
        ),
    ),
    Card("Jina v2", "encoder", "bert:JinaV2", _architectures("JinaBert"), {}),
    Card("RoBERTa, XLM-R", "encoder", "bert:Roberta",
         (*_architectures("Roberta"), *_architectures("XLMRoberta"), *_architectures("Camembert")),
         {"roberta": _ROBERTA, "xlm-roberta": _ROBERTA, "camembert": _ROBERTA}, derive=_usable_positions),
    Card(
        "DistilBERT", "encoder", "bert:DistilBERT", _architectures("DistilBert"),
        {"distilbert": {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
                        "max_position_embeddings": 512}},
        names={"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
               "hidden_dim": "intermediate_size", "activation": "hidden_act"},
    ),
    Card("MPNet", "encoder", "bert:MPNet", _architectures("MPNet"),
         {"mpnet": {**_BERT, "type_vocab_size": 0, "relative_attention_num_buckets": 32}}, derive=_usable_positions),
    Card(
        "ModernBERT", "encoder", "rotary_encoders:ModernBERT", _architectures("ModernBert"),
        {"modernbert": {"hidden_activation": "gelu", "local_attention": 128, "norm_eps": 1e-5,
                        "max_position_embeddings": 8192}},
        derive=_modernbert,
    ),
    Card(
        "Nomic", "encoder", "rotary_encoders:NomicBERT", _architectures("NomicBert"),
        {"nomic_bert": {"hidden_act": "silu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "rope_theta": 1000.0,
                        "max_position_embeddings": 2048}},
        names={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
               "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
               "rotary_emb_fraction": "partial_rotary_factor"},
        derive=_nomic,
        gguf=(
            GGUF("nomic-bert", {"hidden_act": "silu"}, _NORM, _finish_gguf, layers="encoder.layers", root="",
                 names=_NOMIC_NAMES),
        ),
    ),
    Card(
        "GTE", "encoder", "rotary_encoders:GTE", (*_architectures("New"), *_architectures("Gte")),
        {name: {**_BERT, "type_vocab_size": 1, "rope_theta": 160000.0, "max_position_embeddings": 8192}
         for name in ("new", "gte")},
    ),
    Card(
        "Jina v3", "encoder", "rotary_encoders:JinaV3", _architectures("JinaEmbeddingsV3"),
        {"jina_embeddings_v3": {**_ROBERTA, "layer_norm_eps": 1e-5, "rope_theta": 20000.0, "max_position_embeddings": 8194}},
    ),
)  # fmt: skip
