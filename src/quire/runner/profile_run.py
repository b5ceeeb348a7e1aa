"""Steps that nobody asked for, made up to see what they cost or to have run them once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.types.plan import Admission, Outputs, StepPlan
from quire.types.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
COSTLY = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=1)  # what takes the most memory


@dataclass(frozen=True)
class Tenant:
    """A context of `length` tokens of which the last `count` are run."""

    length: int
    count: int
    params: SamplingParams = GREEDY


def largest_step(max_seqs: int, max_batched_tokens: int, longest: int) -> StepPlan:
    """The largest step: as many rows as there may be, sharing the tokens there may be; each asks the sampler for the most.

    No row is longer than `longest`.
    """
    rows = min(max_seqs, max_batched_tokens)
    each, more = divmod(min(max_batched_tokens, rows * longest), rows)
    more = min(more, longest - each)
    return make_step([Tenant(size, size, COSTLY) for size in [each + more] + [each] * (rows - 1)])


def make_step(tenants: Sequence[Tenant], retired: int = 0) -> StepPlan:
    """A step of new tenants in slots 0, 1, ..., all of whom draw; the tenants of the first `retired` slots leave before.

    No table entry is written: every token lands on the null page.
    """
    nothing = np.empty(0, np.int32)
    rows = len(tenants)
    count = np.array([tenant.count for tenant in tenants], np.int32)
    return StepPlan(
        step=0,
        retired=np.arange(retired, dtype=np.int32),
        admitted=tuple(_admit(slot, tenant) for slot, tenant in enumerate(tenants)),
        entry_group=nothing, entry_slot=nothing, entry_index=nothing, entry_page=nothing,
        copy_from=nothing, copy_to=nothing,
        slot=np.arange(rows, dtype=np.int32),
        count=count,
        drafts=np.zeros_like(count),
        end=np.array([tenant.length for tenant in tenants], np.int32),
        outputs=Outputs.last(count, np.ones_like(count)),
    )  # fmt: skip


def _admit(slot: int, tenant: Tenant) -> Admission:
    tokens, start = np.zeros(tenant.length, np.int32), tenant.length - tenant.count
    return Admission(slot, tokens, tenant.length, start, tenant.params, seed=slot, stop_ids=(), bad_words=())
