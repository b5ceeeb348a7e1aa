"""Every family in every way to run it: each cell is transformers' greedy tokens, or the same tokens in two ways.

`make test` runs some cells, others with every commit (tests/rotation.py); `make matrix` runs all. That families are the same
divided among two ranks and in stages is tested for each in tests/dist and tests/engine; adapters, grammars, quantized weights
and restarts are tested with few of them.
"""

import functools

import pytest
import torch

import rotation
from oracle import FALLBACK, FAMILIES, TINY
from quire import LLM, SamplingParams
from quire.cache.capacity import pages_for
from quire.cache.layout import make_layout

NEW_TOKENS, BUDGET, PAGE = 16, 16, 4
PENALTY = 1.5  # keeps tiny random models from saying one token for ever
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (33, 5, 18, 30)
# transformers changes the rope factors of a text that grows long; an engine that caches rotated keys cannot
LONG = {"phi3-longrope": (33, 40, 37, 38)}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NAMES = [*FAMILIES, *(name for name in FALLBACK if name not in FAMILIES)]
IN_CI = 40


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def alone(case):
    llm = case.engine()
    assert [tokens(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in case.prompts] == case.expected


def together(case, **options):
    assert tokens(case.engine(**options).generate(case.prompts, GREEDY, use_tqdm=False)) == case.expected


def prefix_hit(case):
    llm = case.engine()
    first, again = (llm.generate(case.prompts[2], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert tokens([first, again]) == [case.expected[2]] * 2
    assert again.num_cached_tokens == (len(case.prompts[2]) - 1) // PAGE * PAGE


def preemption(case):
    """Pages for one whole request in every cache group, and one more."""
    longest = max(map(len, case.prompts)) + NEW_TOKENS
    pages = pages_for(make_layout(case.facts.layers, PAGE, 4), longest, BUDGET) + 1
    llm = case.engine(max_model_len=longest, num_gpu_blocks_override=pages)
    outputs = llm.generate(case.prompts, GREEDY, use_tqdm=False)
    assert tokens(outputs) == case.expected
    if not any(layer.window for layer in case.facts.layers):
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


def several(case):
    params = SamplingParams(n=3, temperature=1.0, top_k=1, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS, ignore_eos=True)
    [output] = case.engine().generate(case.prompts[0], params, use_tqdm=False)
    assert [choice.token_ids for choice in output.outputs] == [case.expected[0]] * 3


def seeded(case):
    llm = case.engine()
    once = tokens(llm.generate(case.prompts, SEEDED, use_tqdm=False))
    assert [tokens(llm.generate(prompt, SEEDED, use_tqdm=False))[0] for prompt in case.prompts] == once


CELLS = {
    "alone": alone,
    "batched": together,
    **{f"chunks of {n}": functools.partial(together, long_prefill_token_threshold=n) for n in (1, 7, 16)},
    "prefix hit": prefix_hit,
    "preemption": preemption,
    "n > 1": several,
    "seeded sampling": seeded,
    "speculation": functools.partial(together, speculative_config=DRAFTS),
}
TABLE = [(name, cell) for name in NAMES for cell in CELLS]


class Case:
    """A family's checkpoint, and what transformers says to the prompts."""

    def __init__(self, name, found):
        lengths = LONG.get(name, LENGTHS)
        self.facts, self.directory, self.reference = found.facts, found.directory, found.reference
        self.prompts = [
            torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths
        ]

    @functools.cached_property
    def expected(self) -> list[list[int]]:
        return [self._greedy(prompt) for prompt in self.prompts]

    def _greedy(self, prompt):
        with torch.inference_mode():
            ids = self.reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
                repetition_penalty=PENALTY,
            )  # fmt: skip
        return ids[0, len(prompt) :].tolist()

    def engine(self, **options) -> LLM:
        defaults = {
            "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "block_size": PAGE, "max_num_seqs": 8,
            "max_num_batched_tokens": BUDGET, "kv_cache_memory_bytes": 16 << 20,
        }  # fmt: skip
        if "num_gpu_blocks_override" in options:
            del defaults["kv_cache_memory_bytes"]
        return LLM(str(self.directory), **(defaults | options))


@pytest.fixture(scope="module")
def case(checkpoint):
    return functools.cache(lambda name: Case(name, checkpoint(name)))


@pytest.mark.parametrize(("name", "cell"), rotation.sample(TABLE, IN_CI))
def test_cell(case, name, cell):
    CELLS[cell](case(name))
