"""Steps that nobody asked for, made up to see what they cost or to have run them once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.types.plan import Admission, Outputs, RowShapes, StepPlan
from quire.types.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
COSTLY = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=1)  # what takes the most memory


@dataclass(frozen=True)
class Tenant:
    """A context of `length` tokens of which the last `count` are run, and drafts behind them."""

    length: int
    count: int
    params: SamplingParams = GREEDY
    drafts: int = 0


def largest_step(max_seqs: int, max_batched_tokens: int, longest: int, drafts: int = 0) -> StepPlan:
    """The largest step: as many rows as there may be, sharing the tokens there may be; each asks the sampler for the most, and
    draws behind so many drafts, too.

    No row is longer than `longest`.
    """
    drafts = min(drafts, longest - 1, max_batched_tokens - 1)
    rows = min(max_seqs, max_batched_tokens // (1 + drafts))
    each, more = divmod(min(max_batched_tokens, rows * longest), rows)
    more = min(more, longest - each)
    known = [size - drafts for size in [each + more] + [each] * (rows - 1)]
    return make_step([Tenant(size, size, COSTLY, drafts) for size in known])


def make_step(tenants: Sequence[Tenant], retired: int = 0) -> StepPlan:
    """A step of new tenants in slots 0, 1, ..., all of whom draw; the tenants of the first `retired` slots leave before.

    No table entry is written: every token lands on the null page.
    """
    rows = len(tenants)
    drafts = np.array([tenant.drafts for tenant in tenants], np.int32)
    count = drafts + np.array([tenant.count for tenant in tenants], np.int32)
    return StepPlan(
        step=0,
        retired=np.arange(retired, dtype=np.int32),
        admitted=tuple(_admit(slot, tenant) for slot, tenant in enumerate(tenants)),
        slot=np.arange(rows, dtype=np.int32),
        end=drafts + np.array([tenant.length for tenant in tenants], np.int32),
        shapes=RowShapes(count, drafts, Outputs.last(count, 1 + drafts)),
        guesses=drafts,
    )


def _admit(slot: int, tenant: Tenant) -> Admission:
    tokens, start = np.zeros(tenant.length, np.int32), tenant.length - tenant.count
    return Admission(slot, tokens, tenant.length, start, tenant.params, seed=slot, stop_ids=(), bad_words=())
