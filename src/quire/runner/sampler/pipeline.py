"""The stages in their order, applied to the rows of one step."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.device.updates import DeviceUpdates
from quire.ops.arguments import BROKEN, GOOD, NOTHING_ALLOWED, DrawColumns, DrawScratch
from quire.ops.sample import draw
from quire.runner.sampler.draw import Draw
from quire.runner.sampler.edits import Allowed, BadWords, Bias, Masks, MinTokens, Penalties, forbid
from quire.runner.sampler.filters import MinP, Temperature, Truncation, largest
from quire.runner.sampler.logprobs import Logprobs, Report
from quire.runner.sampler.stage import Columns, Edit, Extra, Filter, Part, Rows, Stage, concerns
from quire.runner.transfer import Longs, upload
from quire.types.errors import NO_TOKEN
from quire.types.plan import Admission, Ints
from quire.types.sampling import LogprobsMode

FILTERS: tuple[type[Filter], ...] = ()  # a new one is a file and its class here; those that the fused draw knows are not listed
CACHED_LOGITS = 2**18  # as many stay in a processor's cache while a CPU filters them
FAULTS = {
    BROKEN: "the model's logits are broken: they contain NaN or +inf, or no finite value at all",
    NOTHING_ALLOWED: NO_TOKEN,
}


@dataclass(frozen=True)
class Drawn:
    """What one step drew, still on the device."""

    result: Tensor  # [2, >= N] int32: ids (valid even where there is a fault), and GOOD or a key of FAULTS
    reported: Longs = field(default_factory=lambda: np.empty(0, np.int64))  # [n] the rows with logprobs
    widths: Sequence[int] = ()  # [n] tokens beside the chosen one
    report: Report | None = None  # of those rows
    places: Ints | None = None  # [draws] where the draws are among N; None = they are the first

    @property
    def ids(self) -> Tensor:
        return self.result[0]

    @property
    def fault(self) -> Tensor:
        return self.result[1]


class Sampler:
    """Edits change what may be said and how much, for every row; filters and the draw are for rows that draw at random.

    A greedy row takes the largest logit after the edits. Rows do not see each other: each follows its own parameters.
    With CUDA filters and draw are two launches (`ops/sample.py`), which may be recorded; elsewhere they are stages. A filter
    that those launches do not know (FILTERS) edits its own rows before them; other rows are drawn as if there were none.
    """

    def __init__(
        self,
        slots: int,
        vocabulary: int,
        device: torch.device,
        logprobs_mode: LogprobsMode,
        drafts: int = 0,
        fused: bool | None = None,
        own: int | None = None,
    ) -> None:
        """`drafts`: a slot may draw so many times more in a step. `fused`: None says as on this device. `own`: how many tokens
        the model has itself, if adapters may add some."""
        self._device, self.vocabulary, self._slots = device, vocabulary, slots
        fused = device.type == "cuda" if fused is None else fused
        self._together = max(1, CACHED_LOGITS // vocabulary) if device.type == "cpu" else slots
        self._columns = columns = Columns(slots, device)
        self.logprobs = Logprobs(slots, own or vocabulary, logprobs_mode, device)
        self._temperature = Temperature(columns)
        self._draw = Draw(columns, vocabulary)
        self._edits: tuple[Edit, ...] = (
            Allowed(device), BadWords(device), MinTokens(slots, device), Bias(device), Penalties(columns, vocabulary),
        )  # fmt: skip
        min_p, truncation = MinP(columns), Truncation(columns, vocabulary)
        self._unfused: tuple[Filter, ...] = tuple(make(columns, vocabulary) for make in FILTERS)
        self._filters: tuple[Stage, ...] = (self._temperature, *self._unfused, min_p, truncation)
        self._parts: tuple[Part, ...] = (self.logprobs, *self._edits, *self._filters)
        self._tenants: dict[int, list[Part]] = {}  # of slots that have one: those whose parameters it sets
        self._users: Counter[Part] = Counter()  # how many tenants each has
        self._extras: tuple[Extra, ...] = (self.logprobs, *self._edits)
        self._special: set[int] = set()  # slots for which a draw is not all there is to do
        self._filtered: set[int] = set()  # slots with a filter that a fused draw does not know
        parameters = (self._temperature.column, truncation.top_k, truncation.top_p, min_p.column, self._draw.seed)
        self._parameters = DrawColumns(*(column.there for column in parameters))
        self._scratch = DrawScratch(slots * (1 + drafts), vocabulary, device) if fused else None

    def for_drafts(self) -> "Sampler":
        """Return a sampler of the same tenants for one draft token per slot, with scratch memory of its own: a draft must not
        overwrite what the latest step drew."""
        drafts = copy.copy(self)
        if self._scratch is not None:
            drafts._scratch = DrawScratch(self._slots, self.vocabulary, self._device)
        return drafts

    def admit(self, slot: int, admission: Admission) -> None:
        self.retire(slot)
        self._draw.admit(slot, admission)
        parts = self._tenants[slot] = [part for part in self._parts if concerns(part, admission.params)]
        for part in parts:
            part.admit(slot, admission)
            self._users[part] += 1
        if self._scratch is not None and any(stage in parts and stage.wants(admission) for stage in self._unfused):
            self._filtered.add(slot)
        if slot in self._filtered or any(stage in parts and stage.wants(admission) for stage in self._extras):
            self._special.add(slot)

    def retire(self, slot: int) -> None:
        self._special.discard(slot)
        self._filtered.discard(slot)
        for part in self._tenants.pop(slot, ()):
            part.retire(slot)
            self._users[part] -= 1

    def plain(self, slots: Ints | Longs) -> bool:
        """Whether `draw` is all that these slots ask for: no edits, no logprobs."""
        return not self._special or self._special.isdisjoint(slots.tolist())

    def refresh(self, updates: DeviceUpdates) -> None:
        """What was admitted goes to the device: to be delivered before anything is drawn or replayed."""
        self._columns.refresh(updates)

    def draw(self, logits: Tensor, drawer: Tensor, end: Tensor, tokens: Tensor, fault: Tensor | None = None) -> Tensor:
        """On a GPU, for rows as they come: see `ops/sample.py`."""
        assert self._scratch is not None
        return draw(logits, drawer, end, self._parameters, tokens, self._scratch, fault)

    @property
    def latest(self) -> Tensor:
        """What the latest `draw` gave, recorded or not."""
        assert self._scratch is not None
        return self._scratch.out

    def sample(self, logits: Tensor, rows: Rows, masks: Masks | None = None) -> Drawn:
        """logits [N, V] float32, which this may overwrite; the tokens drawn are also written to their slots."""
        plain = masks is None and self.plain(rows.slots)
        edited, fault, raw = (logits, None, None) if plain else self.edit(logits, rows, masks)
        result = self._draw_rows(edited, rows, fault)
        return Drawn(result) if plain else self.report(result, edited, raw, rows)

    def guess(self, logits: Tensor, rows: Rows) -> Tensor:
        """Draw as `sample` does, without masks and logprobs; return the ids [N] int32, which are also written to their
        slots."""
        edited, fault, _ = (logits, None, None) if self.plain(rows.slots) else self.edit(logits, rows, None)
        return self._draw_rows(edited, rows, fault)[0, : len(rows.slots)]

    def _draw_rows(self, logits: Tensor, rows: Rows, fault: Tensor | None) -> Tensor:
        if self._draws_fused(rows):
            return self.draw(logits, rows.slot, rows.end, rows.tokens, fault)
        return self._draw_in_stages(logits, rows, fault)

    def edit(self, logits: Tensor, rows: Rows, masks: Masks | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the draw is from; then, where something was edited: what was wrong before, and the raw logits of rows that ask
        for logprobs of those."""
        edits = [stage for stage in self._edits if self._users[stage] and stage.active(rows)]
        filtered = self._filtered_rows(rows)
        fault, raw = None, None
        if edits or masks is not None or len(filtered):
            fault = _find_broken(largest(logits)[0])
            wanted = self.logprobs.wanted(rows)
            if len(wanted) and not self.logprobs.processed:
                raw = logits[upload(wanted, self._device)]
        for stage in edits:
            logits = stage.apply(logits, rows)
        if masks is not None:
            logits = forbid(logits, masks)
        return (self._drop(logits, rows, filtered) if len(filtered) else logits), fault, raw

    def report(self, result: Tensor, logits: Tensor, raw: Tensor | None, rows: Rows) -> Drawn:
        """What was drawn, with the logprobs that were asked for."""
        wanted = self.logprobs.wanted(rows)
        if not len(wanted):
            return Drawn(result)
        chosen = upload(wanted, self._device)
        asking = rows.take(wanted)
        report = self.logprobs.of_draws(logits[chosen] if raw is None else raw, result[0].long()[chosen], asking)
        return Drawn(result, wanted, self.logprobs.widths(asking), report)

    def _draws_fused(self, rows: Rows) -> bool:
        """Logprobs of what the filters left are known to stages only."""
        return self._scratch is not None and not (self.logprobs.processed and len(self.logprobs.wanted(rows)))

    def _filtered_rows(self, rows: Rows) -> Longs:
        """Which rows have filters that have to come before their fused draw."""
        if not self._filtered or not self._draws_fused(rows):
            return np.empty(0, np.int64)
        random = self._temperature.random(rows.slots)
        return np.array(
            [row for row, slot in enumerate(rows.slots.tolist()) if random[row] and slot in self._filtered], np.int64
        )

    def _drop(self, logits: Tensor, rows: Rows, index: Longs) -> Tensor:
        """The draw applies the temperature itself: it gets the logits as they were, without what the filters drop."""
        chosen, filtering = upload(index, self._device), rows.take(index)
        kept = logits[chosen]
        scaled = self._temperature.apply(kept.clone(), filtering)
        for stage in self._unfused:
            if stage.active(filtering):
                scaled = stage.apply(scaled, filtering)
        logits[chosen] = kept.masked_fill_(scaled == -torch.inf, -torch.inf)
        return logits

    def _draw_in_stages(self, logits: Tensor, rows: Rows, fault: Tensor | None) -> Tensor:
        """[2, N] int32 ids and faults; `fault` is what was wrong before the edits, if there were any."""
        peak, ids = largest(logits)
        if fault is None:
            fault = _find_broken(peak)
        else:
            fault = torch.where((peak == -torch.inf) & (fault == GOOD), NOTHING_ALLOWED, fault)
        self._draw_at_random(logits, ids, rows)
        result = torch.stack([ids.int(), fault])
        rows.tokens[rows.slot, rows.end] = result[0]
        return result

    def _draw_at_random(self, logits: Tensor, ids: Tensor, rows: Rows) -> None:
        """Filters and draws, into `ids`, for the rows that want it."""
        index = np.flatnonzero(self._temperature.random(rows.slots))
        for part in np.array_split(index, -(-len(index) // self._together)) if len(index) else ():
            chosen, drawing = upload(part, self._device), rows.take(part)
            filtered = logits[chosen]
            for stage in self._filters:
                if self._users[stage] and stage.active(drawing):
                    filtered = stage.apply(filtered, drawing)
            ids[chosen] = self._draw.choose(filtered, drawing)
            if self.logprobs.processed:
                logits[chosen] = filtered


def _find_broken(peak: Tensor) -> Tensor:
    """[N] int32, of rows with this largest logit [N]: a number that is not finite, less itself, is NaN."""
    assert (GOOD, BROKEN) == (0, 1)
    return (peak - peak).ne(0).int()
