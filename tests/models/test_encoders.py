"""Encoder-only models against transformers: states and class logits of packed texts of mixed lengths, in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoder_families import ENCODERS, SIZES, gguf_name, logits_of, random_texts, save_encoder, states_of
from gguf_files import write_gguf
from quire.attn.batch import Batch
from quire.config.facts import ModelFacts, read_facts
from quire.config.families import architectures
from quire.files.resolve import resolve_model
from quire.load.load import load_weights
from quire.models.alibi import alibi_slopes
from quire.models.encoder import Encoder
from quire.models.registry import build_model
from quire.types.errors import ModelError

LENGTHS = [7, 40, 1, 40, 12]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def load(folder: Path, **overrides: object) -> tuple[ModelFacts, Encoder]:
    facts = read_facts(resolve_model(folder), overrides)
    model = build_model(facts)
    load_weights(model, facts, device="cpu", dtype="float32")
    assert isinstance(model, Encoder)
    return facts, model


def pack(texts: list[list[int]], types: list[list[int]] | None = None) -> Batch:
    lengths = [len(text) for text in texts]
    ends = np.cumsum([0, *lengths])
    return Batch(
        ids=torch.tensor([token for text in texts for token in text]),
        positions=torch.cat([torch.arange(count) for count in lengths]),
        row_starts=torch.from_numpy(ends.astype(np.int32)),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32),
        rows=tuple((int(first), count, count) for first, count in zip(ends, lengths, strict=False)),
        logit_index=torch.empty(0, dtype=torch.int64),
        groups=(),
        token_types=None if types is None else torch.tensor([one for text in types for one in text]),
    )


def parts(states: Tensor, texts: list[list[int]]) -> list[Tensor]:
    return list(torch.split(states, [len(text) for text in texts]))


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_packed_texts_have_the_states_that_transformers_gives_each_alone(name: str, tmp_path: Path) -> None:
    reference = save_encoder(ENCODERS[name], tmp_path)
    facts, model = load(tmp_path)
    assert (facts.encoder, facts.layers, model.attentions) == (True, (), [])
    texts = random_texts([*LENGTHS, *([250] if name == "MPNet" else [])])
    batch = pack(texts)
    for text, states in zip(texts, parts(model(batch), texts), strict=True):
        torch.testing.assert_close(states, states_of(reference, text), **TOLERANCE)
        if model.classifier is not None:
            pooled = states if name.endswith("tokens") else states[:1]
            expected = logits_of(reference, text)
            torch.testing.assert_close(model.classify(pooled, batch.tokens).view_as(expected), expected, **TOLERANCE)


@torch.no_grad()
def test_token_types_tell_two_texts_apart(tmp_path: Path) -> None:
    reference = save_encoder(ENCODERS["BERT, cross-encoder"], tmp_path)
    _, model = load(tmp_path)
    texts = random_texts([9, 20])
    types = [[0] * 4 + [1] * 5, [0] * 20]
    batch = pack(texts, types)
    for text, one, states in zip(texts, types, parts(model(batch), texts), strict=True):
        torch.testing.assert_close(model.classify(states[:1], batch.tokens)[0], logits_of(reference, text, one), **TOLERANCE)


@pytest.mark.parametrize("mixed", [None, 0.6])
@torch.no_grad()
def test_ntk_scaling_of_gte(mixed: float | None, tmp_path: Path) -> None:
    """The published formulas: "fixed NTK" changes the base and all frequencies, "mixed NTK" each frequency by its dimension."""
    reference, factor, dim, base = save_encoder(ENCODERS["GTE"], tmp_path), 8.0, 8, 160000.0
    plain = base ** (-torch.arange(0, dim, 2).float() / dim)
    if mixed is None:
        expected = (base * factor) ** (-torch.arange(0, dim, 2).float() / dim) / factor ** (2 / dim)
    else:
        a = torch.tensor(factor).log() / (dim / 2) ** mixed
        expected = plain / (a * torch.arange(1, dim // 2 + 1).float() ** mixed).exp()
    rotary = next(module for module in reference.modules() if hasattr(module, "inv_freq"))
    torch.testing.assert_close(rotary.inv_freq, plain)
    rotary.inv_freq = expected
    scaling = {"type": "ntk", "factor": factor, **({} if mixed is None else {"mixed_b": mixed})}
    facts, model = load(tmp_path, rope_parameters=None, rope_theta=base, rope_scaling=scaling)
    assert facts.max_position == SIZES["max_position_embeddings"]
    texts = random_texts(LENGTHS)
    for text, states in zip(texts, parts(model(pack(texts)), texts), strict=True):
        torch.testing.assert_close(states, states_of(reference, text), **TOLERANCE)


@torch.no_grad()
def test_gte_with_separate_projections(tmp_path: Path) -> None:
    reference = save_encoder(ENCODERS["GTE"], tmp_path)
    path = tmp_path / "model.safetensors"
    stored = {}
    for name, tensor in load_file(path).items():
        parts_of = zip("qkv", tensor.chunk(3), strict=True) if ".qkv_proj." in name else [("qkv", tensor)]
        stored |= {name.replace("qkv_proj", f"{part}_proj"): some.contiguous() for part, some in parts_of}
    save_file({f"new.{name}": tensor for name, tensor in stored.items()}, path, metadata={"format": "pt"})
    _, model = load(tmp_path, pack_qkv=False, unpad_inputs=True, use_memory_efficient_attention=True)
    [text] = random_texts([20])
    torch.testing.assert_close(model(pack([text])), states_of(reference, text), **TOLERANCE)


@torch.no_grad()
def test_a_masked_language_model_is_an_encoder_without_its_head(tmp_path: Path) -> None:
    family = ENCODERS["ModernBERT"]
    reference = save_encoder(type(family)("ModernBertForMaskedLM", family.config, family.options), tmp_path)
    _, model = load(tmp_path)
    [text] = random_texts([20])
    torch.testing.assert_close(model(pack([text])), states_of(reference, text), **TOLERANCE)


@torch.no_grad()
def test_the_first_checkpoints_call_weights_of_norms_gamma_and_beta(tmp_path: Path) -> None:
    reference = save_encoder(ENCODERS["BERT"], tmp_path)
    path = tmp_path / "model.safetensors"
    old = {
        "bert." + (name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")): tensor
        for name, tensor in load_file(path).items()
    }
    save_file({**old, "bert.embeddings.position_ids": torch.arange(96)[None]}, path, metadata={"format": "pt"})
    _, model = load(tmp_path)
    [text] = random_texts([20])
    torch.testing.assert_close(model(pack([text])), states_of(reference, text), **TOLERANCE)


def jina_states(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Jina v2's formula; transformers does not have the model."""
    size, heads, count = SIZES["hidden_size"], SIZES["num_attention_heads"], len(ids)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (size,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    distance = (torch.arange(count) - torch.arange(count)[:, None]).abs()
    bias = -torch.tensor(alibi_slopes(heads))[:, None, None] * distance
    for index in range(SIZES["num_hidden_layers"]):
        path = f"encoder.layer.{index}"
        q, k, v = (
            linear(x, f"{path}.attention.self.{part}").view(count, heads, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        weight = torch.softmax(q @ k.mT / (size // heads) ** 0.5 + bias, -1)
        out = linear((weight @ v).transpose(0, 1).reshape(count, size), f"{path}.attention.output.dense")
        x = norm(x + out, f"{path}.attention.output.LayerNorm")
        gate, up = linear(x, f"{path}.mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(F.gelu(gate) * up, f"{path}.mlp.wo"), f"{path}.mlp.layernorm")
    return x


def save_jina(folder: Path) -> dict[str, Tensor]:
    import json

    generator, size, inner = torch.Generator().manual_seed(5), SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (97, size), "embeddings.token_type_embeddings.weight": (2, size),
        "pooler.dense.weight": (size, size), "pooler.dense.bias": (size,),
    }  # fmt: skip
    names = ["embeddings.LayerNorm"]
    for index in range(SIZES["num_hidden_layers"]):
        path = f"encoder.layer.{index}"
        names += [f"{path}.attention.output.LayerNorm", f"{path}.mlp.layernorm"]
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{path}.{part}.weight": (size, size), f"{path}.{part}.bias": (size,)}
        shapes |= {f"{path}.mlp.gated_layers.weight": (2 * inner, size), f"{path}.mlp.wo.weight": (size, inner),
                   f"{path}.mlp.wo.bias": (size,)}  # fmt: skip
    shapes |= {f"{name}.{kind}": (size,) for name in names for kind in ("weight", "bias")}
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**SIZES, "architectures": ["JinaBertModel"], "model_type": "bert", "position_embedding_type": "alibi",
              "feed_forward_type": "geglu", "layer_norm_eps": 1e-12}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@torch.no_grad()
def test_jina_v2(tmp_path: Path) -> None:
    weights = save_jina(tmp_path)
    _, model = load(tmp_path)
    texts = random_texts(LENGTHS)
    for text, states in zip(texts, parts(model(pack(texts)), texts), strict=True):
        torch.testing.assert_close(states, jina_states(weights, text), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("BERT", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ("BERT", {"is_decoder": True}, "is_decoder true is not supported"),
        ("Nomic", {"prenorm": True}, "prenorm is not supported"),
        ("GTE", {"logn_attention_scale": True}, "logn_attention_scale True is not supported"),
        ("GTE", {"layer_norm_type": "rms_norm"}, "layer_norm_type 'rms_norm' is not supported"),
        ("BERT, cross-encoder", {"id2label": None, "num_labels": -1}, "num_labels must be a positive integer"),
    ],
)
def test_what_is_not_built_is_refused_by_name(name: str, overrides: dict[str, object], message: str, tmp_path: Path) -> None:
    save_encoder(ENCODERS[name], tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, **overrides)


@pytest.mark.parametrize(
    ("name", "architecture", "fields"),
    [("BERT", "bert", {"pooling_type": 2}), ("Nomic", "nomic-bert", {"pooling_type": 1, "rope.freq_base": 1000.0})],
)
@torch.no_grad()
def test_gguf_files(name: str, architecture: str, fields: dict[str, object], tmp_path: Path) -> None:
    reference = save_encoder(ENCODERS[name], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture=architecture,
        fields={
            "block_count": 3, "context_length": 96, "embedding_length": 32, "feed_forward_length": 56,
            "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False, **fields,
        },
        metadata={"tokenizer.ggml.tokens": [f"t{index}" for index in range(97)]},
        tensors={gguf_name(name): value.numpy() for name, value in stored.items() if not name.startswith("pooler.")},
    )  # fmt: skip
    facts, model = load(path)
    assert facts.hf["pooling_type"] == {1: "MEAN", 2: "CLS"}[fields["pooling_type"]]  # type: ignore[index]
    texts = random_texts(LENGTHS)
    for text, states in zip(texts, parts(model(pack(texts)), texts), strict=True):
        torch.testing.assert_close(states, states_of(reference, text), **TOLERANCE)


def test_every_encoder_is_in_the_table() -> None:
    """Jina v2, which transformers does not have, has a test of its own."""
    cards = {card.title for card in architectures().values() if card.kind == "encoder"}
    assert cards == {*(architectures()[family.model].title for family in ENCODERS.values()), "Jina v2"}


def test_roberta_has_two_positions_less_than_rows(tmp_path: Path) -> None:
    save_encoder(ENCODERS["RoBERTa"], tmp_path)
    facts, _ = load(tmp_path)
    assert facts.max_position == SIZES["max_position_embeddings"] - 2
