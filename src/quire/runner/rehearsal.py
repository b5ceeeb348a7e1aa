"""The plan of the largest step an engine may be asked for, to see what it costs."""

import numpy as np

from quire.types.plan import Admission, StepPlan
from quire.types.sampling import SamplingParams


def rehearsal_plan(max_seqs: int, max_batched_tokens: int) -> StepPlan:
    """As many rows as there may be, sharing the tokens there may be; each asks the sampler for what takes most memory.

    No table entry is written: every token lands on the null page.
    """
    rows = min(max_seqs, max_batched_tokens)
    count = np.full(rows, max_batched_tokens // rows, np.int32)
    count[0] += max_batched_tokens % rows
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=1)
    nothing = np.empty(0, np.int32)
    return StepPlan(
        step=0,
        retired=nothing,
        admitted=tuple(
            Admission(slot, np.zeros(length, np.int32), int(length), 0, params, seed=0, stop_ids=(), bad_words=())
            for slot, length in enumerate(count)
        ),
        entry_group=nothing, entry_slot=nothing, entry_index=nothing, entry_page=nothing,
        copy_from=nothing, copy_to=nothing,
        slot=np.arange(rows, dtype=np.int32), count=count, end=count.copy(), sample=np.ones(rows, np.bool_),
    )  # fmt: skip
