"""Where our own kernels run whole decoders, a request has the same numbers in any company: alone, beside others, in pieces of
any length, after a prefix hit."""

from dataclasses import replace

import pytest
from tiny import make_model, open_model

from oracle import FAMILIES, make_checkpoint
from quire import SamplingParams
from quire.attn import cpu
from quire.ops.native import kernels, run_decoders
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


@apart
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False}], ids=str)
def test_numbers_are_the_same_in_any_company(model, settings):
    alone = open_model(model, enable_prefix_caching=False, max_num_batched_tokens=256)
    expected = [ask(alone, [prompt])[0] for prompt in PROMPTS]
    llm = open_model(model, **settings)
    for prompts, answers in (
        (PROMPTS, expected),
        (PROMPTS[::-1] + PROMPTS, expected[::-1] + expected),
        (PROMPTS * 2, expected * 2),
    ):
        assert ask(llm, prompts) == answers


@pytest.mark.skipif(kernels() is None, reason="no C compiler was there when Quire was installed")
def test_tokens_by_themselves_are_attended_to_as_others_are(model, monkeypatch):
    """On every CPU: the same tokens as by the usual way."""
    usual = ask(open_model(model), PROMPTS)
    monkeypatch.setattr(cpu, "run_decoders", lambda: True)
    monkeypatch.setattr(cpu.CPUAttention, "run", lambda *given: pytest.fail("the kernel was not asked"))
    assert [tokens for tokens, _ in ask(open_model(model), PROMPTS)] == [tokens for tokens, _ in usual]


@pytest.mark.skipif(kernels() is None, reason="no C compiler was there when Quire was installed")
def test_short_rows_are_the_kernels(model, monkeypatch):
    """Whatever windows and soft caps there are: torch is not asked, and the tokens are its own."""
    usual = ask(open_model(model), PROMPTS)
    for way in ("_run_piece", "_run_single_token"):
        monkeypatch.setattr(cpu.CPUAttention, way, lambda *given: pytest.fail("torch was asked"))
    assert ask(open_model(model), PROMPTS) == usual
    monkeypatch.undo()
    monkeypatch.setattr(cpu.one_query, "suits", lambda kv: False)
    assert [tokens for tokens, _ in ask(open_model(model), PROMPTS)] == [tokens for tokens, _ in usual]
