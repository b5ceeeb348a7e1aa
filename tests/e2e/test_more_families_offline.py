"""More families through the whole engine: one engine for each obeys the laws of `test_families_offline.py` in one go."""

import pytest
import torch

from more_families import MORE
from oracle import TINY
from quire import LLM, SamplingParams
from quire.cache.capacity import pages_for
from quire.cache.layout import make_layout

NEW_TOKENS, BUDGET = 16, 16
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
LENGTHS = (33, 5, 18, 30)
FIRST = {family.architecture: name for name, family in reversed(MORE.items())}.values()  # checkpoint of each architecture
PROMPTS = [torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


@pytest.mark.parametrize("name", FIRST)
def test_chunks_preemption_and_prefix_hits(checkpoint, name):
    """Prompts are cut; there are pages for one whole request in every cache group, and one more; then it is asked again."""
    case = checkpoint(name)
    longest = max(LENGTHS) + NEW_TOKENS
    llm = LLM(
        str(case.directory), skip_tokenizer_init=True, dtype="float32", device="cpu", block_size=4, max_num_seqs=8,
        max_model_len=longest, max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=pages_for(make_layout(case.facts.layers, 4, 4), longest, BUDGET) + 1,
    )  # fmt: skip
    expected = [greedy(case.reference, prompt) for prompt in PROMPTS]
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    if not any(layer.window for layer in case.facts.layers):
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    first = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]
    again = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == expected[2]
    assert again.num_cached_tokens == (LENGTHS[2] - 1) // 4 * 4


def greedy(model, prompt: list[int]) -> list[int]:
    """transformers' own continuation."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
            repetition_penalty=1.5,
        )  # fmt: skip
    return ids[0, len(prompt) :].tolist()
