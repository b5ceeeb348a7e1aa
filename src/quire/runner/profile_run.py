"""Made-up steps, for profile and warm-up runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.types.plan import Admission, Outputs, RowShapes, StepPlan
from quire.types.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
COSTLY = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=1)  # parameters that take the most memory


@dataclass(frozen=True)
class MadeUpRequest:
    """A request of `length` known tokens, of which the last `count` and `drafts` draft tokens are run."""

    length: int
    count: int
    params: SamplingParams = GREEDY
    drafts: int = 0


def largest_step(max_seqs: int, max_batched_tokens: int, longest: int, drafts: int = 0) -> StepPlan:
    """Return the largest step: max_seqs rows share max_batched_tokens tokens, with the costliest sampling and all drafts.

    longest: no row is longer.
    """
    drafts = min(drafts, longest - 1, max_batched_tokens - 1)
    rows = min(max_seqs, max_batched_tokens // (1 + drafts))
    each, more = divmod(min(max_batched_tokens, rows * longest), rows)
    more = min(more, longest - each)
    known = [size - drafts for size in [each + more] + [each] * (rows - 1)]
    return make_step([MadeUpRequest(size, size, COSTLY, drafts) for size in known])


def make_step(requests: Sequence[MadeUpRequest], retired: int = 0) -> StepPlan:
    """Return a step of new requests in slots 0, 1, ..., which all draw. The first `retired` slots are retired before.

    No table entry is written: every token uses the null page.
    """
    rows = len(requests)
    drafts = np.array([request.drafts for request in requests], np.int32)
    count = drafts + np.array([request.count for request in requests], np.int32)
    return StepPlan(
        step=0,
        retired=np.arange(retired, dtype=np.int32),
        admitted=tuple(_admit(slot, request) for slot, request in enumerate(requests)),
        slot=np.arange(rows, dtype=np.int32),
        end=drafts + np.array([request.length for request in requests], np.int32),
        shapes=RowShapes(count, drafts, Outputs.last(count, 1 + drafts)),
        guesses=drafts,
    )


def _admit(slot: int, request: MadeUpRequest) -> Admission:
    tokens, start = np.zeros(request.length, np.int32), request.length - request.count
    return Admission(slot, tokens, request.length, start, request.params, seed=slot, stop_ids=(), bad_words=())
