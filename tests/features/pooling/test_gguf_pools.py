"""GGUF files of embedders and rerankers: `pooling_type` decides, and `cls` tensors are the head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoder_families import SIZES, Encoder, logits_of, save_encoder, states_of
from gguf_files import tiny_llama, write_gguf
from quire import LLM, PoolingParams
from quire.types.errors import ModelError

IDS = [[3, 4, 5, 6], [7, 8]]
PARTS = (
    ("embeddings.word_embeddings", "token_embd"), ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"), ("embeddings.LayerNorm", "token_embd_norm"),
    ("encoder.layer.", "blk."), ("attention.self.query", "attn_q"), ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"), ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"), ("intermediate.dense", "ffn_up"),
    ("output.LayerNorm", "layer_output_norm"), ("output.dense", "ffn_down"),
    ("pooler.dense", "cls"), ("classifier.", "cls.output."),
)  # fmt: skip


def convert(folder: Path, kind: int, head: bool, **more: Any) -> Path:
    """Write a BERT checkpoint as GGUF, as llama.cpp's conversion does: matrices of one row are vectors."""
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("bert.")
        if name.startswith("pooler.") and not head:
            continue
        for old, new in PARTS:
            name = name.replace(old, new)
        tensors[name] = value.numpy()[0] if name == "cls.output.weight" and len(value) == 1 else value.numpy()
    fields = {
        "block_count": 3, "context_length": 96, "embedding_length": 32, "feed_forward_length": 56, "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "pooling_type": kind, **more,
    }  # fmt: skip
    metadata = {"tokenizer.ggml.tokens": [f"t{index}" for index in range(97)]}
    return write_gguf(folder / "model.gguf", architecture="bert", fields=fields, metadata=metadata, tensors=tensors)


def opened(path: Path, **args: Any) -> LLM:
    return LLM(str(path), device="cpu", dtype="float32", max_num_seqs=4, skip_tokenizer_init=True, **args)


def prompts() -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in IDS]


@pytest.mark.parametrize("labels", [1, 3])
def test_a_reranker_or_classifier(tmp_path: Path, labels: int) -> None:
    model = save_encoder(Encoder("BertForSequenceClassification", "BertConfig", {**SIZES, "num_labels": labels}), tmp_path)
    names = [f"class {i}" for i in range(labels)]
    path = convert(tmp_path, 4, True, **{"classifier.output_labels": names})
    with opened(path) as llm:
        assert llm.supported_tasks == ("classify", "token_classify", *(("score",) if labels == 1 else ()))
        found = llm.classify(prompts(), use_tqdm=False)
        assert llm.llm_engine.config.features["pooling"].labels == tuple(names)
    for ids, one in zip(IDS, found, strict=True):
        logits = logits_of(model, ids)
        right = logits.sigmoid() if labels == 1 else logits.softmax(-1)
        np.testing.assert_allclose(one.outputs.probs, right.numpy(), atol=1e-5)


def test_a_head_without_a_dense_layer(tmp_path: Path) -> None:
    model = save_encoder(Encoder("BertForSequenceClassification", "BertConfig", {**SIZES, "num_labels": 1}), tmp_path)
    with opened(convert(tmp_path, 4, False)) as llm:
        found = llm.classify(prompts(), use_tqdm=False)
    for ids, one in zip(IDS, found, strict=True):
        with torch.no_grad():
            right = model.classifier(states_of(model, ids)[0]).sigmoid()
        np.testing.assert_allclose(one.outputs.probs, right.numpy(), atol=1e-5)


def test_an_encoder_that_pools_nothing_has_a_vector_for_each_token(tmp_path: Path) -> None:
    model = save_encoder(Encoder("BertModel", "BertConfig", SIZES), tmp_path)
    with opened(convert(tmp_path, 0, False)) as llm:
        assert llm.supported_tasks == ("token_embed", "score")
        found = llm.encode(prompts(), PoolingParams(use_activation=False), use_tqdm=False)
    for ids, one in zip(IDS, found, strict=True):
        np.testing.assert_allclose(one.outputs.data, states_of(model, ids).numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_a_decoder_pools_as_its_file_says(tmp_path: Path, kind: int) -> None:
    path = tiny_llama(tmp_path / "model.gguf", fields={"pooling_type": kind})
    with opened(path) as llm:
        assert llm.supported_tasks == ("embed", "token_embed", "score")
        raw = PoolingParams(use_activation=False)
        found = [one.outputs.embedding for one in llm.embed(prompts(), pooling_params=raw, use_tqdm=False)]
        every = PoolingParams(task="token_embed", use_activation=False)
        states = [one.outputs.data for one in llm.encode(prompts(), every, use_tqdm=False)]
    choose = {1: lambda x: x.mean(0), 2: lambda x: x[0], 3: lambda x: x[-1]}[kind]
    np.testing.assert_allclose(found, [choose(one) for one in states], atol=1e-5)
    with opened(path, runner="generate") as llm:
        assert llm.supported_tasks == ("generate",)


def test_a_decoder_with_a_classification_head(tmp_path: Path) -> None:
    weight = np.random.default_rng(4).standard_normal((2, 32)).astype(np.float32)
    fields = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    with opened(tiny_llama(tmp_path / "model.gguf", fields={"pooling_type": 3})) as llm:
        raw = PoolingParams(use_activation=False)
        states = [one.outputs.embedding for one in llm.embed(prompts(), pooling_params=raw, use_tqdm=False)]
    with opened(tiny_llama(tmp_path / "ranks.gguf", fields=fields, tensors={"cls.output.weight": weight})) as llm:
        assert llm.supported_tasks == ("classify", "token_classify")
        found = [one.outputs.probs for one in llm.classify(prompts(), use_tqdm=False)]
    np.testing.assert_allclose(found, torch.softmax(torch.tensor(states) @ torch.tensor(weight).T, -1).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"), [(9, "pooling_type must be one of 0, 1, 2, 3, 4, got 9"), (4, "cls.output.weight")]
)
def test_a_wrong_pooling_type(tmp_path: Path, kind: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tiny_llama(tmp_path / "model.gguf", fields={"pooling_type": kind}))
