"""Pooling on a GPU: vectors and scores of encoders and decoders are those of transformers, in any batch and any chunks."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from test_decoders import PROMPTS, made, normal, states
from test_encoders_pool import write_sentence_files

from encoder_families import ENCODERS, logits_of, random_texts, save_encoder, states_of
from quire import LLM, PoolingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]

TEXTS = random_texts([7, 40, 1, 40, 12, 64, 3, 90, 17])
KNOWN = {name: family for name, family in ENCODERS.items() if hasattr(transformers, family.config)}  # to this transformers
BASES = [name for name in KNOWN if "," not in name]
CLASSIFIERS = [name for name, family in KNOWN.items() if family.model.endswith("ForSequenceClassification")]


def opened(directory: Path, **args: object) -> LLM:
    defaults = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "skip_tokenizer_init": True}
    return LLM(str(directory), **defaults | {"kv_cache_memory_bytes": 1 << 26} | args)


def prompts(texts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": text} for text in texts]


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
@pytest.mark.parametrize("name", BASES)
def test_vectors_of_encoders(name: str, pooling: str, tmp_path: Path) -> None:
    model = save_encoder(ENCODERS[name], tmp_path)
    write_sentence_files(tmp_path, pooling)
    with opened(tmp_path) as llm:
        together = llm.embed(prompts(TEXTS), use_tqdm=False)
        alone = [llm.embed(one, use_tqdm=False)[0] for one in prompts(TEXTS)]
        again = [llm.embed(prompts(TEXTS), use_tqdm=False) for _ in range(6)][-1]
        graphs = llm.llm_engine.core.executor._runner.graphs
        assert graphs.captures and graphs.replays
        llm.llm_engine.core.scheduler.roster.check()
    for text, *found in zip(TEXTS, together, alone, again, strict=True):
        right = states_of(model, text)
        right = right.mean(0) if pooling == "mean_tokens" else right[0]
        for one in found:
            np.testing.assert_allclose(one.outputs.embedding, torch.nn.functional.normalize(right, dim=-1).numpy(), atol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_of_encoders(name: str, tmp_path: Path) -> None:
    model = save_encoder(ENCODERS[name], tmp_path)
    with opened(tmp_path) as llm:
        found = llm.classify(prompts(TEXTS), use_tqdm=False)
    for text, one in zip(TEXTS, found, strict=True):
        logits = logits_of(model, text)
        np.testing.assert_allclose(one.outputs.probs, (logits.sigmoid() if len(logits) == 1 else logits.softmax(-1)), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["BERT", "MPNet", "ModernBERT"])
def test_sixteen_bits(name: str, dtype: str, tmp_path: Path) -> None:
    model = save_encoder(ENCODERS[name], tmp_path)
    write_sentence_files(tmp_path, "mean_tokens")
    with opened(tmp_path, dtype=dtype) as llm:
        found = llm.embed(prompts(TEXTS), use_tqdm=False)
    for text, one in zip(TEXTS, found, strict=True):
        right = torch.nn.functional.normalize(states_of(model, text).mean(0), dim=-1).numpy()
        assert float(np.dot(one.outputs.embedding, right)) > 0.995


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN"])
def test_vectors_of_decoders(kind: str, tmp_path: Path) -> None:
    model = made(tmp_path)
    right = {"LAST": lambda x: x[-1], "CLS": lambda x: x[0], "MEAN": lambda x: x.mean(0)}[kind]
    for args in ({}, {"max_num_batched_tokens": 16}):
        with opened(tmp_path, pooler_config={"pooling_type": kind}, num_gpu_blocks_override=64, **args) as llm:
            for _ in range(6):  # from the second time on with prefix hits, later in graphs
                for ids, one in zip(PROMPTS, llm.embed(prompts(PROMPTS), use_tqdm=False), strict=True):
                    expected = normal(right(states(model, ids))).numpy()
                    np.testing.assert_allclose(one.outputs.embedding, expected, atol=1e-5)
            raw = PoolingParams(task="token_embed", use_activation=False)
            for ids, one in zip(PROMPTS, llm.encode(prompts(PROMPTS), raw, use_tqdm=False), strict=True):
                np.testing.assert_allclose(one.outputs.data, states(model, ids).numpy(), atol=5e-5)
            graphs = llm.llm_engine.core.executor._runner.graphs
            assert graphs.captures and graphs.replays


@pytest.mark.parametrize("labels", [1, 3])
def test_classes_of_decoders(labels: int, tmp_path: Path) -> None:
    model = made(tmp_path, "Qwen2ForSequenceClassification", "Qwen2Config", num_labels=labels)
    with opened(tmp_path, num_gpu_blocks_override=64) as llm:
        found = llm.classify(prompts(PROMPTS), use_tqdm=False)
    for ids, one in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(one.outputs.probs, (logits.sigmoid() if labels == 1 else logits.softmax(-1)), atol=1e-5)


def test_memory_is_free_after_an_engine_and_another_can_start(tmp_path: Path) -> None:
    model = save_encoder(ENCODERS["BERT"], tmp_path)
    used = []
    for _ in range(3):
        llm = opened(tmp_path)
        [found] = llm.embed(prompts(TEXTS[:1]), use_tqdm=False)
        right = torch.nn.functional.normalize(states_of(model, TEXTS[0])[0], dim=-1).numpy()
        np.testing.assert_allclose(found.outputs.embedding, right, atol=1e-5)
        del llm
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    assert used[0] == used[-1]
