"""The stages in their order, applied to the rows of one step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.allowed import Allowed
from quire.runner.sampler.bad_words import BadWords
from quire.runner.sampler.bias import Bias
from quire.runner.sampler.draw import Draw
from quire.runner.sampler.extremes import largest
from quire.runner.sampler.grammar import Masks, forbid
from quire.runner.sampler.logprobs import Logprobs, Report
from quire.runner.sampler.min_p import MinP
from quire.runner.sampler.min_tokens import MinTokens
from quire.runner.sampler.penalties import Penalties
from quire.runner.sampler.stage import Rows, Stage, Tenancy
from quire.runner.sampler.temperature import Temperature
from quire.runner.sampler.truncation import Truncation
from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission
from quire.types.sampling import LogprobsMode

CACHED_LOGITS = 2**18  # as many stay in a processor's cache while a CPU filters them
GOOD, BROKEN, NOTHING_ALLOWED = 0, 1, 2
FAULTS = {
    BROKEN: "the model's logits are broken: they contain NaN or +inf, or no finite value at all",
    NOTHING_ALLOWED: "no token is allowed: structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias forbid "
    "every one together",
}


@dataclass(frozen=True)
class Drawn:
    """What one step drew, still on the device."""

    ids: Tensor  # [N] int64; a valid id even where there is a fault
    fault: Tensor  # [N] int64: GOOD or a key of FAULTS
    reported: Longs  # [n] the rows with logprobs
    widths: list[int]  # [n] tokens beside the chosen one
    report: Report | None  # of those rows


class Sampler:
    """Edits change what may be said and how much, for every row; filters and the draw are for rows that draw at random.

    A greedy row takes the largest logit after the edits. Rows do not see each other: each follows its own parameters.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device, logprobs_mode: LogprobsMode) -> None:
        self._device = device
        self._together = max(1, CACHED_LOGITS // vocabulary) if device.type == "cpu" else slots
        self.logprobs = Logprobs(slots, vocabulary, logprobs_mode, device)
        self._temperature = Temperature(slots, device)
        self._draw = Draw(slots, vocabulary, device)
        self._edits: tuple[Stage, ...] = (
            Allowed(device), BadWords(device), MinTokens(slots, device), Bias(device), Penalties(slots, device),
        )  # fmt: skip
        self._filters: tuple[Stage, ...] = (self._temperature, MinP(slots, device), Truncation(slots, vocabulary, device))
        self._parts: tuple[Tenancy, ...] = (self.logprobs, self._draw, *self._edits, *self._filters)

    def admit(self, slot: int, admission: Admission) -> None:
        self.retire(slot)
        for part in self._parts:
            part.admit(slot, admission)

    def retire(self, slot: int) -> None:
        for part in self._parts:
            part.retire(slot)

    def sample(self, logits: Tensor, rows: Rows, masks: Masks | None = None) -> Drawn:
        """logits [N, V] float32, which this may overwrite."""
        wanted = self.logprobs.wanted(rows)
        raw = self._reported_values(logits, wanted) if len(wanted) and not self.logprobs.processed else None
        peak, ids = largest(logits)
        fault = torch.where(peak.isfinite(), GOOD, BROKEN)
        edits = [stage for stage in self._edits if stage.active(rows)]
        for stage in edits:
            logits = stage.apply(logits, rows)
        if masks is not None:
            logits = forbid(logits, masks)
        if edits or masks is not None:
            peak, ids = largest(logits)
            fault = torch.where((peak == -torch.inf) & (fault == GOOD), NOTHING_ALLOWED, fault)
        self._draw_at_random(logits, ids, rows)
        if not len(wanted):
            return Drawn(ids, fault, wanted, [], None)
        values = self._reported_values(logits, wanted) if raw is None else raw
        asking = rows.take(wanted)
        report = self.logprobs.of_draws(values, ids[upload(wanted, self._device)], asking)
        return Drawn(ids, fault, wanted, self.logprobs.widths(asking), report)

    def _reported_values(self, logits: Tensor, wanted: Longs) -> Tensor:
        return self.logprobs.values(logits if len(wanted) == len(logits) else logits[upload(wanted, self._device)])

    def _draw_at_random(self, logits: Tensor, ids: Tensor, rows: Rows) -> None:
        """Filters and draws, into `ids`, for the rows that want it."""
        index = np.flatnonzero(self._temperature.random(rows.slots))
        for part in np.array_split(index, -(-len(index) // self._together)) if len(index) else ():
            chosen, drawing = upload(part, self._device), rows.take(part)
            filtered = logits[chosen]
            for stage in self._filters:
                if stage.active(drawing):
                    filtered = stage.apply(filtered, drawing)
            ids[chosen] = self._draw.choose(filtered, drawing)
            if self.logprobs.processed:
                logits[chosen] = filtered
