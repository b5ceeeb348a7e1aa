"""Edits of the logits before sampling, in the order of the pipeline.

Each keeps its state per slot and is skipped if no row of the step uses it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.ops.arguments import Factors
from quire.ops.sample import penalize
from quire.runner.sampler.stage import LEAST, MOST, Columns, ColumnStage, Lists, Rows
from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission, Words

ANYTHING = -1  # matches any token at the start of a sequence
COUNTED_ROWS = 64  # rows whose tokens are counted at once on a GPU
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence


class Allowed:
    """allowed_token_ids: forbids every other token."""

    fields = ("allowed_token_ids",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = Lists(device)

    def wants(self, admission: Admission) -> bool:
        return admission.params.allowed_token_ids is not None

    def admit(self, slot: int, admission: Admission) -> None:
        if admission.params.allowed_token_ids is not None:
            self._ids.put(slot, np.array(admission.params.allowed_token_ids, np.int64))

    def retire(self, slot: int) -> None:
        self._ids.drop(slot)

    def active(self, rows: Rows) -> bool:
        return self._ids.holders(rows.slots).size > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        holders = self._ids.holders(rows.slots)
        row, ids, _ = self._ids.gather(rows.slots, holders)
        kept = logits[row, ids]
        logits[upload(holders, self._device)] = -torch.inf
        logits[row, ids] = kept
        return logits


class BadWords:
    """bad_words: forbids the token that would complete a forbidden sequence.

    Only generated tokens count as the beginning of a sequence: a word begun by the prompt may be completed, as in vLLM.
    """

    fields = ("bad_words",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}

    def wants(self, admission: Admission) -> bool:
        return any(admission.bad_words)

    def admit(self, slot: int, admission: Admission) -> None:
        words = tuple(word for word in admission.bad_words if word)
        if words:
            self._words[slot] = words

    def retire(self, slot: int) -> None:
        self._words.pop(slot, None)

    def active(self, rows: Rows) -> bool:
        return bool(self._words) and not self._words.keys().isdisjoint(rows.slots.tolist())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row, beginning, last = (upload(array, self._device) for array in self._collect(rows))
        width = beginning.shape[1]
        position = rows.end[row, None] - width + torch.arange(width, device=self._device)  # [W, width]
        recent = rows.tokens[rows.slot[row, None], position.clamp(min=0)]
        matched = ((recent == beginning) & (position >= rows.prompt[row, None])) | (beginning == ANYTHING)
        # added, because a token may be the last of several words, and -inf must win over the words that do not match
        ban = torch.zeros_like(last, dtype=logits.dtype).masked_fill_(matched.all(dim=1), -torch.inf)
        return logits.index_put_((row, last), ban, accumulate=True)

    def _collect(self, rows: Rows) -> tuple[Longs, Longs, Longs]:
        """Return for every word of every row: the row [W], its beginning [W, width], aligned to the end of the row, its last
        token [W].
        """
        found = [(row, word) for row, slot in enumerate(rows.slots.tolist()) for word in self._words.get(slot, ())]
        width = max(len(word) for _, word in found) - 1
        beginning = np.full((len(found), width), ANYTHING, np.int64)
        for i, (_, word) in enumerate(found):
            beginning[i, width - len(word) + 1 :] = word[:-1]
        return np.array([row for row, _ in found], np.int64), beginning, np.array([word[-1] for _, word in found], np.int64)


class MinTokens:
    """min_tokens: forbids tokens that end generation until enough tokens are generated."""

    fields = ("min_tokens",)

    def __init__(self, slots: int, device: torch.device) -> None:
        self._least = np.zeros(slots, np.int64)  # [S]
        self._stops = Lists(device)

    def wants(self, admission: Admission) -> bool:
        return admission.params.min_tokens > 0 and bool(admission.stop_ids)

    def admit(self, slot: int, admission: Admission) -> None:
        if self.wants(admission):
            self._least[slot] = admission.params.min_tokens
            self._stops.put(slot, np.array(admission.stop_ids, np.int64))

    def retire(self, slot: int) -> None:
        self._least[slot] = 0
        self._stops.drop(slot)

    def active(self, rows: Rows) -> bool:
        return bool(self._short(rows).any())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row, ids, _ = self._stops.gather(rows.slots, np.flatnonzero(self._short(rows)))
        logits[row, ids] = -torch.inf
        return logits

    def _short(self, rows: Rows) -> npt.NDArray[np.bool_]:
        short: npt.NDArray[np.bool_] = rows.outputs < self._least[rows.slots]
        return short


class Bias:
    """logit_bias: adds values to the logits of some tokens."""

    fields = ("logit_bias",)

    def __init__(self, device: torch.device) -> None:
        self._bias = Lists(device)

    def wants(self, admission: Admission) -> bool:
        return bool(admission.params.logit_bias)

    def admit(self, slot: int, admission: Admission) -> None:
        bias = admission.params.logit_bias
        if bias:
            self._bias.put(slot, np.array(list(bias.keys()), np.int64), np.array(list(bias.values()), np.float32))

    def retire(self, slot: int) -> None:
        self._bias.drop(slot)

    def active(self, rows: Rows) -> bool:
        return self._bias.holders(rows.slots).size > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row, ids, values = self._bias.gather(rows.slots, self._bias.holders(rows.slots))
        logits[row, ids] += values
        return logits


class Penalties(ColumnStage):
    """repetition_penalty over prompt and output; frequency_penalty and presence_penalty over the output alone.

    They are computed each step from the slot's tokens, so preemption, replay and forks need no code here.
    """

    fields = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self._device, self._vocabulary = columns.device, vocabulary
        super().__init__(*(columns.make(np.float32, neutral) for neutral in NO_PENALTIES))
        self._factors = Factors(*(column.on_device for column in self._parameters))
        self._counts: Tensor | None = None

    def wants(self, admission: Admission) -> bool:
        return _factors(admission) != NO_PENALTIES

    def admit(self, slot: int, admission: Admission) -> None:
        for column, value in zip(self._parameters, _factors(admission), strict=True):
            column[slot] = value

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        index = np.flatnonzero(self.used(rows))
        rows = rows.take(index)
        if self._device.type == "cuda" and self._counts is None:
            self._counts = torch.zeros(COUNTED_ROWS, self._vocabulary, dtype=torch.int32, device=self._device)
        row, longest = upload(index, self._device), int(rows.ends.max())
        penalize(logits, row, rows.slot, rows.end, rows.prompt, rows.tokens, self._factors, self._counts, longest)
        return logits


def _factors(admission: Admission) -> tuple[float, float, float]:
    params = admission.params
    repetition = min(max(params.repetition_penalty, LEAST), MOST)  # 0 or infinity in float32 would make a logit NaN
    return repetition, params.frequency_penalty, params.presence_penalty


@dataclass(frozen=True)
class Masks:
    """Tokens that grammars allow in this step.

    Bit v of a row, counted from the lowest bit of its first word, is token v. Tokens after the last word are forbidden:
    grammars know the model's own tokens, not those that adapters add.
    """

    rows: Longs  # [m] indices among the rows that sample
    bits: Words  # [m, W]


def forbid(logits: Tensor, masks: Masks) -> Tensor:
    """Set forbidden tokens of logits [N, V] to -inf, in place."""
    device, vocabulary = logits.device, min(logits.shape[1], 32 * masks.bits.shape[1])
    if device.type == "cpu":
        banned = np.unpackbits((~masks.bits).view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(
            np.bool_
        )  # [m, V]
        for row, where in zip(masks.rows.tolist(), banned, strict=True):
            np.copyto(logits[row, :vocabulary].numpy(), -np.inf, where=where)
            logits[row, vocabulary:] = -np.inf
        return logits
    words = upload(masks.bits.view(np.int32), device)  # [m, W]
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)  # [m, W, 32]
    allowed = (bits & 1).bool().reshape(len(words), -1)[:, :vocabulary]  # [m, V]
    rows = upload(masks.rows, device)
    kept = logits[rows]
    kept[:, :vocabulary].masked_fill_(~allowed, -torch.inf)
    kept[:, vocabulary:] = -torch.inf
    logits[rows] = kept
    return logits
