"""Steps that are run before the engine is ready, so that the first requests find their kernels compiled and loaded.

The steps have the shapes that traffic has: rows of one token, few and many, with short and long contexts; prompts of several
lengths; both together; each with the kinds of sampling there are. They run on the null page, and what they compute is thrown
away. What a shape needs is not known here: it is run as any step is.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.runner.rehearsal import GREEDY, Tenant, make_step
from quire.types.plan import StepPlan
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.ops.kernels.variants import Variants

RANDOM = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
PENALIZED = SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logprobs=5)
KINDS = (GREEDY, RANDOM, FILTERED, PENALIZED)
LONG = 1024  # tokens of a context that is worked on in several pieces
SINGLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of one token
PROMPTS = (2, 16, 64, 256, 1024)  # tokens
RECORDED = 4  # times a step is repeated, so that it is recorded and replayed where steps are
MIXED = 3  # prompts beside rows of one token


def watch_kernels() -> "Variants | None":
    """What counts compiled kernels; None where there is no compiler."""
    if importlib.util.find_spec("triton") is None:
        return None
    from quire.ops.kernels.variants import VARIANTS

    return VARIANTS


def warm_up_steps(max_seqs: int, max_tokens: int, longest: int) -> Iterator[StepPlan]:
    """Each with tenants of its own, who leave as the next step comes; the last step has none. No context exceeds `longest`."""
    before = 0
    for tenants in _shapes(max_seqs, max_tokens, longest):
        yield make_step(tenants, retired=before)
        before = len(tenants)
    yield make_step((), retired=before)


def _shapes(max_seqs: int, max_tokens: int, long: int) -> Iterator[Sequence[Tenant]]:
    for params in KINDS:
        yield [Tenant(1, 1, params)]
    most = min(max_seqs, max_tokens)
    for rows in sorted({min(size, most) for size in SINGLES}):
        yield [Tenant(long if row % 2 else 1, 1, KINDS[row % len(KINDS)]) for row in range(rows)]
        yield [Tenant(long, 1)] * rows
    for _ in range(RECORDED):
        yield [Tenant(long, 1, RANDOM)]
    for tokens in (size for size in PROMPTS if size <= min(max_tokens, long)):
        yield [Tenant(tokens, tokens)]
        beside = min(MIXED, max_seqs - 1, max_tokens - tokens)
        if beside > 0:
            yield [Tenant(tokens, tokens, RANDOM), *[Tenant(long, 1)] * beside]
