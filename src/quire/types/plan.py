"""The bridge: the only two values that cross between the deciding half and the executing half.

Request ids stay on the deciding side; the device knows slots. Arrays are numpy so that a plan can be sent as bytes.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.types.sampling import SamplingParams

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


def _none() -> Ints:
    return np.empty(0, np.int32)


@dataclass(frozen=True)
class Admission:
    """A slot gets a new tenant: all tokens known so far, of which the first `start` are already in the cache."""

    slot: int
    tokens: Ints  # [known]
    prompt_length: int
    start: int
    params: SamplingParams
    seed: int  # 64 bits, resolved: never None on the device
    stop_ids: tuple[int, ...]  # suppressed until min_tokens are out
    bad_words: tuple[tuple[int, ...], ...]  # token sequences that must not be completed


@dataclass(frozen=True)
class StepPlan:
    """One step: who came and went, which pages changed hands, and the ragged batch of rows to run.

    Order of effects on the device: retire, admit, given tokens, tables, copies, then the rows.
    A row is "`count` more tokens of `slot`"; `sample` says that it reaches the last known token, so its logits are wanted.
    The rows `masked` may draw only what a mask allows. Masks depend on tokens of the step before, so they are not part of the
    plan: the step is started without them, and draws when it gets them.
    """

    step: int
    retired: Ints  # [retired] slots whose tenant left
    admitted: tuple[Admission, ...]
    # page-table entries to write: table[group][slot, index] = page
    entry_group: Ints  # [entries]
    entry_slot: Ints  # [entries]
    entry_index: Ints  # [entries]
    entry_page: Ints  # [entries]
    # pages to duplicate before anything is written in this step (copy on write)
    copy_from: Ints  # [copies]
    copy_to: Ints  # [copies]
    # the rows
    slot: Ints  # [rows]
    count: Ints  # [rows]
    end: Ints  # [rows] position after the row's last token: its key length
    sample: Bools  # [rows]
    masked: Ints = field(default_factory=_none)  # [masked] indices of rows, rising; all of them sample
    # tokens that were not drawn: tokens[slot, position] = token, in order, each after the slot's last
    given_slot: Ints = field(default_factory=_none)  # [given]
    given_position: Ints = field(default_factory=_none)  # [given]
    given_token: Ints = field(default_factory=_none)  # [given]

    @property
    def tokens(self) -> int:
        return int(self.count.sum())


@dataclass(frozen=True)
class TopLogprobs:
    """For each position: column 0 is the chosen token, the others the most likely ones in falling order."""

    ids: Ints  # [positions, 1 + k]
    values: Floats  # [positions, 1 + k]
    rank: Ints  # [positions] 1-based rank of the chosen token


@dataclass(frozen=True)
class StepResult:
    """`sampled[i]` belongs to row i; -1 where the row was a chunk."""

    step: int
    sampled: Ints  # [rows]
    logprobs: dict[int, TopLogprobs] = field(default_factory=dict)  # row -> its one sampled position
    prompt_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)  # row -> prompt positions start+1 ... of this chunk
    failed: dict[int, str] = field(default_factory=dict)  # row -> why; the other rows are good
