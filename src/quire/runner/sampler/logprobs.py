"""logprobs: the log probability of the chosen token, its rank, and those of other tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.ops.sample import score
from quire.runner.sampler.stage import Rows
from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission, TopLogprobs
from quire.types.sampling import LogprobsMode

NOT_REQUESTED = -1


@dataclass(frozen=True)
class Report:
    """Logprobs of some positions while still on the device: column 0 is the chosen token."""

    ids: Tensor  # [n, 1 + k] int32
    values: Tensor  # [n, 1 + k] float32
    rank: Tensor  # [n] int32

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ids, self.values, self.rank]


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest logits [n, V] per row [n, count], in falling order."""
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    if count == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices
    return logits.topk(count, dim=1).indices


class Logprobs:
    """The logprobs that slots request, and of which tokens. Nothing is computed for other slots."""

    fields = ("logprobs", "logprob_token_ids", "prompt_logprobs")

    def __init__(self, slots: int, vocabulary: int, mode: LogprobsMode, device: torch.device) -> None:
        self.mode = mode
        self.processed = mode.startswith("processed")
        self._vocabulary = vocabulary
        self._device = device
        self._width = np.full(slots, NOT_REQUESTED, np.int64)  # [S] tokens in addition to the chosen one
        self._prompt_width = np.full(slots, NOT_REQUESTED, np.int64)  # [S] the same for prompt positions
        self._ids: dict[int, Longs] = {}  # slots that name their tokens

    def wants(self, admission: Admission) -> bool:
        return admission.params.logprobs is not None or admission.params.logprob_token_ids is not None

    def admit(self, slot: int, admission: Admission) -> None:
        params = admission.params
        if params.logprob_token_ids is not None:
            self._ids[slot] = np.array(params.logprob_token_ids, np.int64)
            self._width[slot] = len(params.logprob_token_ids)
        else:
            self._width[slot] = self._count(params.logprobs)
        self._prompt_width[slot] = self._count(params.prompt_logprobs)

    def retire(self, slot: int) -> None:
        self._width[slot] = self._prompt_width[slot] = NOT_REQUESTED
        self._ids.pop(slot, None)

    def requested(self, rows: Rows) -> Longs:
        """Return the rows that request logprobs of the token they sample."""
        return np.flatnonzero(self._width[rows.slots] != NOT_REQUESTED)

    def of_samples(self, logits: Tensor, chosen: Tensor, rows: Rows) -> Report:
        """Return the report for logits [n, V] of `rows`, which all request logprobs. It is as wide as the widest row."""
        widths = self._width[rows.slots]
        others = top_ids(logits, int(widths.max()))
        named = [row for row, slot in enumerate(rows.slots.tolist()) if slot in self._ids]
        if named:
            ids = np.zeros((len(named), others.shape[1]), np.int64)
            for i, row in enumerate(named):
                ids[i, : widths[row]] = self._ids[int(rows.slots[row])]
            others[upload(np.array(named, np.int64), self._device)] = upload(ids, self._device)
        return self._report(logits, chosen, others)

    def of_prompt(self, logits: Tensor, targets: Tensor, slot: int) -> Report:
        """Return the report for logits [n, V] at prompt positions; targets [n] are the next tokens."""
        return self._report(logits, targets, top_ids(logits, int(self._prompt_width[slot])))

    def _report(self, logits: Tensor, chosen: Tensor, others: Tensor) -> Report:
        """Return the report for logits [n, V], chosen [n] and others [n, k] int64."""
        ids = torch.cat([chosen[:, None], others], dim=1)
        peak, spread, rank = score(logits, chosen)
        values = logits.gather(1, ids)
        if not self.mode.endswith("logits"):
            values = values - peak[:, None] - spread[:, None]
        return Report(ids.int(), values, rank)

    def widths(self, rows: Rows) -> list[int]:
        widths: list[int] = self._width[rows.slots].tolist()
        return widths

    def _count(self, asked: int | None) -> int:
        if asked is None:
            return NOT_REQUESTED
        return self._vocabulary if asked == -1 else min(asked, self._vocabulary)


def to_top_logprobs(
    ids: npt.NDArray[np.generic], values: npt.NDArray[np.generic], rank: npt.NDArray[np.generic]
) -> TopLogprobs:
    return TopLogprobs(ids.astype(np.int32), values.astype(np.float32), rank.astype(np.int32))
