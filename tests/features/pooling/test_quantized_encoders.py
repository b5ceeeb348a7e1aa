"""Encoders with quantized weights: their vectors are nearly those of the weights that the quantized values stand for."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.torch import load_file, save_file
from test_encoders_pool import opened

from encoder_families import ENCODERS, SIZES, Encoder, gguf_name, logits_of, random_texts, save_encoder
from gguf_files import write_gguf
from quantized_checkpoints import SCHEMES

WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
PROMPTS = [{"prompt_token_ids": text} for text in random_texts([7, 40, 1, 12])]
MEAN = {"pooler_config": {"pooling_type": "MEAN"}}


def vectors(path: Path, **args: object) -> np.ndarray:
    with opened(path, **MEAN, **args) as llm:
        return np.array([one.outputs.embedding for one in llm.embed(PROMPTS, use_tqdm=False)])


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(1)


def in_blocks(weight: np.ndarray, kind: Type) -> np.ndarray:
    """Return the bytes of a matrix in a GGUF type. `gguf` cannot write Q4_K: its values are random then."""
    if kind is not Type.Q4_K:
        return quants.quantize(weight, kind)
    random = np.random.default_rng(weight.shape[0])
    size, count = gguf.GGML_QUANT_SIZES[kind][1], weight.size // 256
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    blocks[:, :4] = np.array([0.0005, 7.5 * 0.0005], np.float16).view(np.uint8)  # scale, and scale of minima: the mean is 0
    return blocks.reshape(len(weight), -1)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K, Type.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("name", "architecture"), [("BERT", "bert"), ("Nomic", "nomic-bert")])
def test_gguf(name: str, architecture: str, kind: Type, tmp_path: Path) -> None:
    family = ENCODERS[name]
    floats = tmp_path / "floats"
    save_encoder(Encoder(family.model, family.config, WIDE), floats)
    stored, tensors = load_file(floats / "model.safetensors"), {}
    for path, value in stored.items():
        if path.startswith("pooler."):
            continue
        if value.ndim == 2 and "position" not in path and "type" not in path:
            blocks = in_blocks(value.numpy(), kind)
            tensors[gguf_name(path)] = (blocks, kind)
            stored[path] = torch.from_numpy(quants.dequantize(blocks, kind).reshape(value.shape).astype(np.float32))
        else:
            tensors[gguf_name(path)] = value.numpy()
    save_file(stored, floats / "model.safetensors", metadata={"format": "pt"})
    rope = {} if name == "BERT" else {"rope.freq_base": 1000.0}
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture=architecture,
        fields={
            "block_count": 2, "context_length": 96, "embedding_length": 256, "feed_forward_length": 256,
            "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "pooling_type": 1,
            **rope,
        },
        metadata={"tokenizer.ggml.tokens": [f"t{index}" for index in range(97)]},
        tensors=tensors,
    )  # fmt: skip
    with opened(path) as llm:  # the file says how it pools
        found = np.array([one.outputs.embedding for one in llm.embed(PROMPTS, use_tqdm=False)])
    assert cosines(found, vectors(floats)).min() > 0.999


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}], ids=["alone", "ranks"])
@pytest.mark.parametrize("scheme", ["bnb-nf4", "bnb-int8", "gptq", "awq", "fp8-block"])
def test_checkpoints(scheme: str, sizes: dict[str, int], tmp_path: Path, quick: None) -> None:
    if sizes and scheme != "gptq":
        pytest.skip("one scheme shows that ranks divide quantized matrices")
    size = 128
    floats, quantized = tmp_path / "floats", tmp_path / "quantized"
    save_encoder(Encoder("BertModel", "BertConfig", {**WIDE, "hidden_size": size, "intermediate_size": size}), floats)
    shutil.copytree(floats, quantized)
    given, writers = SCHEMES[scheme]
    stored, values = load_file(floats / "model.safetensors"), {}
    for path, value in list(stored.items()):
        values[path] = value
        if path.startswith("encoder.") and value.ndim == 2:
            name = path.removesuffix(".weight")
            tensors, values[path] = writers(name)(name, value)
            del stored[path]
            stored |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(values, floats / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": given}))
    assert cosines(vectors(quantized, **sizes), vectors(floats)).min() > 0.999


@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "GTE"])
def test_fp8_at_load(name: str, tmp_path: Path) -> None:
    save_encoder(ENCODERS[name], tmp_path)
    assert 0.98 < cosines(vectors(tmp_path, quantization="fp8"), vectors(tmp_path)).min() < 1 - 1e-6


def test_fp8_at_load_leaves_the_classification_head(tmp_path: Path) -> None:
    """Without layers there is nothing else to quantize."""
    family = ENCODERS["XLM-R, classes"]
    model = save_encoder(Encoder(family.model, family.config, {**family.options, "num_hidden_layers": 0}), tmp_path)
    with opened(tmp_path, quantization="fp8") as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
    for prompt, one in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(one.outputs.probs, logits_of(model, prompt["prompt_token_ids"]).softmax(-1), atol=1e-5)
