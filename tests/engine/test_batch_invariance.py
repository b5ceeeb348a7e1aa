"""Where our own kernels run whole decoders, the logits of a request are the same in any batch, for any chunks of its prompt,
and after a prefix hit."""

from dataclasses import replace

import pytest
import torch
from tiny import make_model, open_model

from oracle import FAMILIES, make_checkpoint
from quantized_checkpoints import write
from quire import SamplingParams
from quire.attn import cpu
from quire.ops.native import kernels, run_decoders
from quire.ops.paged_attention import AttentionRows
from tiny_model import make_tokenizer

PARAMS = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5 + i * 7 % 300 for i in range(length)] for length in (1, 3, 17, 40, 100, 180)]
apart = pytest.mark.skipif(not run_decoders(), reason="libraries multiply on this CPU, and company changes their last bits")


@pytest.fixture(scope="module", params=["llama", "gemma2", "gemma3", "mistral-window"])
def model(tmp_path_factory, request):
    """Windows, soft caps, both, and neither. Heads have 16 numbers: what the kernel takes."""
    directory = tmp_path_factory.mktemp("company")
    if request.param == "llama":
        return make_model(directory, hidden_size=64)
    family = FAMILIES[request.param]
    make_checkpoint(
        replace(family, settings={**family.settings, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256}),
        directory,
    )
    make_tokenizer(directory)
    return directory


def ask(llm, prompts, params=PARAMS):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        (list(one.token_ids), [[(token, lp.logprob) for token, lp in step.items()] for step in one.logprobs])
        for one in (output.outputs[0] for output in outputs)
    ]


@pytest.fixture(scope="module")
def expected(model):
    alone = open_model(model, enable_prefix_caching=False, max_num_batched_tokens=256)
    return [ask(alone, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def usual(model):
    return ask(open_model(model), PROMPTS)


@apart
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False}], ids=str)
def test_numbers_are_the_same_in_any_company(model, expected, settings):
    llm = open_model(model, **settings)
    for prompts, answers in (
        (PROMPTS, expected),
        (PROMPTS[::-1] + PROMPTS, expected[::-1] + expected),
        (PROMPTS * 2, expected * 2),
    ):
        assert ask(llm, prompts) == answers


@apart
def test_a_quantized_checkpoint_with_a_head_of_floats(tmp_path):
    directory = write("awq", tmp_path)
    make_tokenizer(directory)
    prompts = [[token % 300 for token in prompt] for prompt in PROMPTS[:4]]
    alone = open_model(directory, enable_prefix_caching=False)
    assert ask(open_model(directory), prompts) == [ask(alone, [prompt])[0] for prompt in prompts]


@apart
def test_prompts_have_the_bits_of_tokens_one_by_one(model, monkeypatch):
    """The kernel takes many tokens of a row over the same keys."""
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, prompt_logprobs=3)

    def ask_all(llm):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        return [(output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs]

    usual, cuts = ask_all(open_model(model, max_num_batched_tokens=256)), []

    def rows_of_one(batch, group):
        numbers, ends = [], []
        for row, (_, count, length) in enumerate(batch.rows):
            numbers += [row] * count
            ends += range(length - count + 1, length + 1)
        cuts.append(len(ends) - len(batch.rows))
        lengths, starts = torch.tensor(ends, dtype=torch.int32), torch.arange(len(ends) + 1, dtype=torch.int32)
        return AttentionRows(batch.groups[group].tables[numbers], lengths, starts)

    monkeypatch.setattr(cpu, "batch_rows", rows_of_one)
    assert ask_all(open_model(model, max_num_batched_tokens=256)) == usual and max(cuts) > 200


@pytest.mark.skipif(kernels() is None, reason="no C compiler was there when Quire was installed")
def test_rows_of_any_length_are_the_kernels(model, usual, monkeypatch):
    """On every CPU: the same tokens as by the usual way."""
    monkeypatch.setattr(cpu, "run_decoders", lambda: True)
    monkeypatch.setattr(cpu.CPUAttention, "run", lambda *given: pytest.fail("the kernel was not asked"))
    assert [tokens for tokens, _ in ask(open_model(model), PROMPTS)] == [tokens for tokens, _ in usual]


@pytest.mark.skipif(kernels() is None, reason="no C compiler was there when Quire was installed")
def test_short_rows_are_the_kernels(model, usual, monkeypatch):
    """Whatever windows and soft caps there are: torch is not asked, and the tokens are its own."""
    for way in ("_run_chunk", "_run_single_token"):
        monkeypatch.setattr(cpu.CPUAttention, way, lambda *given: pytest.fail("torch was asked"))
    assert ask(open_model(model), PROMPTS) == usual
    monkeypatch.undo()
    monkeypatch.setattr(cpu.paged_attention, "suits", lambda kv: False)
    assert [tokens for tokens, _ in ask(open_model(model), PROMPTS)] == [tokens for tokens, _ in usual]
