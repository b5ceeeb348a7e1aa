"""Dequantized copies of quantized matrices on a GPU: the bits of the dequantized matrices, and users choose."""

import logging

import pytest
import torch

from quantized_checkpoints import write
from quire import LLM, SamplingParams
from quire.config import dequantized_copies
from quire.ops import quantized
from quire.ops.packed import PackedMatrix, multiply_floats
from quire.types.errors import ConfigError

# so long that each alone is dequantized without copies: the products are the same ones then
PROMPTS = [[3 + (number * number + 7 * row) % 300 for number in range(200 - 7 * row)] for row in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
MADE, NONE = "copies of quantized matrices in bfloat16, for many rows", "no copies of quantized matrices"
SCHEMES = ["awq", "gptq-act-order", "gptq-8", "ct-int8", "ct-mxfp4", "modelopt-nvfp4", "ct-mxfp8", "gptq-head"]


def engine(directory, **options):
    return LLM(str(directory), skip_tokenizer_init=True, max_model_len=256, kv_cache_memory_bytes=1 << 26, **options)


def answers(llm):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    scores = [entry[token].logprob for output, prompt in zip(outputs, PROMPTS, strict=True)
              for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]  # fmt: skip
    return [list(output.outputs[0].token_ids) for output in outputs], torch.tensor(scores)


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, logger="quire")
    logger = logging.getLogger("quire")
    logger.addHandler(caplog.handler)  # whoever sets logging up may have taken it from the others
    yield lambda text: any(text in message for message in caplog.messages)
    logger.removeHandler(caplog.handler)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_answers_are_close_to_the_dequantized_models(tmp_path, scheme, told):
    directory = write(scheme, tmp_path)
    found, scores = answers(engine(directory))
    assert told(MADE)
    floats, expected = answers(engine(directory.parent / "floats", dtype="bfloat16"))
    assert [row[0] for row in found] == [row[0] for row in floats]  # decode steps read the packed matrices
    assert (scores - expected).norm() < 0.02 * expected.norm()


def multiply_dequantized(matrix, x, bias, activation, after):
    """Multiply by the dequantized matrix, for any number of tokens and without a copy."""
    return multiply_floats(x, matrix.dequantize(x), bias, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_change_no_bit_where_matrices_are_dequantized(tmp_path, scheme, told, monkeypatch):
    """Kernels of packed matrices add in another order than a copy's GEMM, so copies are compared with dequantizing each time.

    Steps run eagerly: which bucket of CUDA graphs a step borrows, and so its number of rows, depends on time.
    """
    directory = write(scheme, tmp_path)
    for kind in quantized.COPIED:
        monkeypatch.setitem(quantized.COPIED, kind, (1, 1, 1))  # copies for any number of tokens
    found, scores = answers(engine(directory, enforce_eager=True))
    assert told(MADE)
    monkeypatch.setattr(PackedMatrix, "_multiply", multiply_dequantized)
    tokens, expected = answers(engine(directory, enforce_eager=True, dequantized_copies=False))
    assert tokens == found and torch.equal(scores, expected)


@pytest.mark.gpu
def test_who_rounds_rows_has_none(tmp_path, told):
    answers(engine(write("ct-fp8-channel", tmp_path)))
    assert not told(MADE) and not told(NONE)


@pytest.mark.gpu
def test_a_user_and_the_memory_decide(tmp_path, told, monkeypatch):
    directory = write("awq", tmp_path)
    engine(directory, dequantized_copies=False)
    assert not told(MADE) and not told(NONE)
    monkeypatch.setattr(dequantized_copies, "MEMORY_SHARE", 1 << 60)
    engine(directory)
    assert told(NONE) and not told(MADE)
    engine(directory, dequantized_copies=True)
    assert told(MADE)
    with pytest.raises(ConfigError, match="leave dequantized_copies out"):
        LLM(str(directory), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 50, dequantized_copies=True)


def test_a_cpu_has_none(tmp_path, told):
    directory = write("awq", tmp_path)
    found, scores = answers(engine(directory, device="cpu"))
    tokens, others = answers(engine(directory, device="cpu", dequantized_copies=False))
    assert tokens == found and torch.equal(others, scores)
    assert not told(MADE) and not told(NONE)
    with pytest.raises(ConfigError, match="dequantized_copies requires CUDA and a 16-bit dtype"):
        engine(directory, device="cpu", dequantized_copies=True)
