"""The sampler: stages in their order, applied to the rows of one step."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.ops.arguments import BROKEN, GOOD, NOTHING_ALLOWED, SampleColumns, SampleScratch
from quire.ops.sample import sample_rows
from quire.runner.sampler.edits import Allowed, BadWords, Bias, Masks, MinTokens, Penalties, forbid
from quire.runner.sampler.filters import MinP, Temperature, Truncation, largest
from quire.runner.sampler.gumbel import GumbelSampling
from quire.runner.sampler.logprobs import Logprobs, Report
from quire.runner.sampler.stage import Columns, Edit, Extra, Filter, Processors, Rows, SamplerPart, SamplerStage, concerns
from quire.runner.transfer import Longs, upload
from quire.types.errors import NO_TOKEN
from quire.types.plan import Admission, Ints
from quire.types.sampling import LogprobsMode

FILTERS: tuple[type[Filter], ...] = ()  # additional filters; those of the fused kernel are not listed
CACHED_LOGITS = 2**18  # elements that fit a CPU's cache while it filters them
FAULTS = {
    BROKEN: "the model's logits are broken: they contain NaN or +inf, or no finite value at all",
    NOTHING_ALLOWED: NO_TOKEN,
}


@dataclass(frozen=True)
class Sampled:
    """The samples of one step, on the device."""

    result: Tensor  # [2, >= N] int32: ids (valid even where there is a fault), and GOOD or a key of FAULTS
    reported: Longs = field(default_factory=lambda: np.empty(0, np.int64))  # [n] the rows with logprobs
    widths: Sequence[int] = ()  # [n] tokens in addition to the chosen one
    report: Report | None = None  # of those rows
    sample_index: Ints | None = None  # [samples] columns of `result` with the samples; None: the first
    faults: Mapping[int, str] = field(default_factory=lambda: FAULTS)

    @property
    def ids(self) -> Tensor:
        return self.result[0]

    @property
    def fault(self) -> Tensor:
        return self.result[1]


class Sampler:
    """The sampler: edits change the logits of every row; filters and random sampling are for rows with a temperature.

    A greedy row takes the largest logit after the edits. Each row follows its own parameters. On CUDA, filters and sampling
    are two launches (`ops/sample.py`), which may be recorded; on other devices they are stages. A filter that the
    launches lack (FILTERS) edits its own rows before them; other rows are sampled as without it.
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
        """drafts: further samples per slot in a step.
        fused: filters and sampling are one kernel; None: on CUDA.
        own: the model's own tokens, if adapters may add some.
        """
        self._device, self.vocabulary, self._slots = device, vocabulary, slots
        fused = device.type == "cuda" if fused is None else fused
        self._together = max(1, CACHED_LOGITS // vocabulary) if device.type == "cpu" else slots
        self.columns = columns = Columns(slots, device)
        self.logprobs = Logprobs(slots, own or vocabulary, logprobs_mode, device)
        self._temperature = Temperature(columns)
        self._random = GumbelSampling(columns, vocabulary)
        self._edits: tuple[Edit, ...] = (
            Allowed(device), BadWords(device), MinTokens(slots, device), Bias(device), Penalties(columns, vocabulary),
        )  # fmt: skip
        min_p, truncation = MinP(columns), Truncation(columns, vocabulary)
        self._unfused: tuple[Filter, ...] = tuple(make(columns, vocabulary) for make in FILTERS)
        self._filters: tuple[SamplerStage, ...] = (self._temperature, *self._unfused, min_p, truncation)
        self._parts: tuple[SamplerPart, ...] = (self.logprobs, *self._edits, *self._filters)
        self._used: dict[int, list[SamplerPart]] = {}  # slot -> the parts whose parameters its request sets
        self._users: Counter[SamplerPart] = Counter()  # requests that use each part
        self._extras: tuple[Extra, ...] = (self.logprobs, *self._edits)
        self._special: set[int] = set()  # slots with edits, logprobs or unfused filters
        self._filtered: set[int] = set()  # slots with a filter that the fused kernel lacks
        parameters = (self._temperature.column, truncation.top_k, truncation.top_p, min_p.column, self._random.seed)
        self._parameters = SampleColumns(*(column.on_device for column in parameters))
        self._scratch = SampleScratch(slots * (1 + drafts), vocabulary, device) if fused else None
        self._processors: Processors | None = None
        self._faults: Mapping[int, str] = FAULTS  # of the latest edited step

    def insert(self, processors: Processors) -> None:
        """Let logits processors edit the logits of all requests that are admitted from now on."""
        *before, penalties = self._edits
        self._edits = (*before, processors, penalties)
        self._parts, self._extras = (*self._parts, processors), (*self._extras, processors)
        self._processors = processors

    def for_drafts(self) -> "Sampler":
        """Return a sampler of the same requests for one draft token per slot.

        It has its own scratch memory: a draft must not overwrite what the latest step sampled.
        """
        drafts = copy.copy(self)
        if self._scratch is not None:
            drafts._scratch = SampleScratch(self._slots, self.vocabulary, self._device)
        return drafts

    def admit(self, slot: int, admission: Admission) -> None:
        self.retire(slot)
        self._random.admit(slot, admission)
        parts = self._used[slot] = [part for part in self._parts if concerns(part, admission.params)]
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
        for part in self._used.pop(slot, ()):
            part.retire(slot)
            self._users[part] -= 1

    def plain(self, slots: Ints | Longs) -> bool:
        """Return whether these slots need only `sample_fused`: no edits, no logprobs."""
        return not self._special or self._special.isdisjoint(slots.tolist())

    def sample_fused(
        self, logits: Tensor, sampling_slot: Tensor, end: Tensor, tokens: Tensor, fault: Tensor | None = None
    ) -> Tensor:
        """Sample by the fused kernel: see `ops/sample.py`."""
        assert self._scratch is not None
        return sample_rows(logits, sampling_slot, end, self._parameters, tokens, self._scratch, fault)

    @property
    def latest(self) -> Tensor:
        """Return the result of the latest `sample_fused`, recorded or not."""
        assert self._scratch is not None
        return self._scratch.out

    def sample(self, logits: Tensor, rows: Rows, masks: Masks | None = None) -> Sampled:
        """Sample from logits [N, V] float32, which may be overwritten. The tokens are also written to their slots."""
        plain = masks is None and self.plain(rows.slots)
        edited, fault, raw = (logits, None, None) if plain else self.edit(logits, rows, masks)
        result = self._sample_rows(edited, rows, fault)
        return Sampled(result) if plain else self.report(result, edited, raw, rows)

    def guess(self, logits: Tensor, rows: Rows) -> Tensor:
        """Sample as `sample` does, without masks and logprobs; return the ids [N] int32, which are also written to their
        slots."""
        edited, fault, _ = (logits, None, None) if self.plain(rows.slots) else self.edit(logits, rows, None)
        return self._sample_rows(edited, rows, fault)[0, : len(rows.slots)]

    def _sample_rows(self, logits: Tensor, rows: Rows, fault: Tensor | None) -> Tensor:
        if self._samples_fused(rows):
            return self.sample_fused(logits, rows.slot, rows.end, rows.tokens, fault)
        return self._sample_in_stages(logits, rows, fault)

    def edit(self, logits: Tensor, rows: Rows, masks: Masks | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the edited logits; if something was edited, also the faults before, and the raw logits of rows that report
        raw logprobs."""
        edits = [stage for stage in self._edits if self._users[stage] and stage.active(rows)]
        filtered = self._filtered_rows(rows)
        fault, raw = None, None
        if edits or masks is not None or len(filtered):
            fault = _find_broken(largest(logits)[0])
            requested = self.logprobs.requested(rows)
            if len(requested) and not self.logprobs.processed:
                raw = logits[upload(requested, self._device)]
        for stage in edits:
            logits = stage.apply(logits, rows)
        if masks is not None:
            logits = forbid(logits, masks)
        if self._processors is not None and self._users[self._processors]:
            assert fault is not None
            logits, fault = self._finish(self._processors, logits, rows, fault)
        return (self._drop(logits, rows, filtered) if len(filtered) else logits), fault, raw

    def _finish(self, processors: Processors, logits: Tensor, rows: Rows, fault: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the last edits; give each row that they failed a fault of its own."""
        logits, failed = processors.finish(logits, rows, self._temperature.column.host[rows.slots])
        first = max(FAULTS) + 1
        self._faults = {**FAULTS, **{first + i: why for i, why in enumerate(failed.values())}}
        if failed:
            at, codes = np.array([*failed], np.int64), np.arange(first, first + len(failed), dtype=np.int32)
            fault[upload(at, self._device)] = upload(codes, self._device)
        return logits, fault

    def report(self, result: Tensor, logits: Tensor, raw: Tensor | None, rows: Rows) -> Sampled:
        """Return the samples with the requested logprobs."""
        requested = self.logprobs.requested(rows)
        if not len(requested):
            return Sampled(result, faults=self._faults)
        chosen = upload(requested, self._device)
        asking = rows.take(requested)
        report = self.logprobs.of_samples(logits[chosen] if raw is None else raw, result[0].long()[chosen], asking)
        return Sampled(result, requested, self.logprobs.widths(asking), report, faults=self._faults)

    def _samples_fused(self, rows: Rows) -> bool:
        """Return whether the fused kernel samples: logprobs of filtered logits need the stages."""
        return self._scratch is not None and not (self.logprobs.processed and len(self.logprobs.requested(rows)))

    def _filtered_rows(self, rows: Rows) -> Longs:
        """Return the rows with filters that must run before the fused kernel."""
        if not self._filtered or not self._samples_fused(rows):
            return np.empty(0, np.int64)
        random = self._temperature.random(rows.slots)
        return np.array(
            [row for row, slot in enumerate(rows.slots.tolist()) if random[row] and slot in self._filtered], np.int64
        )

    def _drop(self, logits: Tensor, rows: Rows, index: Longs) -> Tensor:
        """Drop filtered tokens. The fused kernel applies the temperature itself, so the logits stay unscaled."""
        chosen, filtering = upload(index, self._device), rows.take(index)
        kept = logits[chosen]
        scaled = self._temperature.apply(kept.clone(), filtering)
        for stage in self._unfused:
            if stage.active(filtering):
                scaled = stage.apply(scaled, filtering)
        logits[chosen] = kept.masked_fill_(scaled == -torch.inf, -torch.inf)
        return logits

    def _sample_in_stages(self, logits: Tensor, rows: Rows, fault: Tensor | None) -> Tensor:
        """Return ids and faults [2, N] int32. fault: of the logits before the edits, if there were any."""
        peak, ids = largest(logits)
        if fault is None:
            fault = _find_broken(peak)
        else:
            fault = torch.where((peak == -torch.inf) & (fault == GOOD), NOTHING_ALLOWED, fault)
        self._sample_at_random(logits, ids, rows)
        result = torch.stack([ids.int(), fault])
        rows.tokens[rows.slot, rows.end] = result[0]
        return result

    def _sample_at_random(self, logits: Tensor, ids: Tensor, rows: Rows) -> None:
        """Filter and sample, into `ids`, for rows with a temperature."""
        index = np.flatnonzero(self._temperature.random(rows.slots))
        for part in np.array_split(index, -(-len(index) // self._together)) if len(index) else ():
            chosen, sampling = upload(part, self._device), rows.take(part)
            filtered = logits[chosen]
            for stage in self._filters:
                if self._users[stage] and stage.active(sampling):
                    filtered = stage.apply(filtered, sampling)
            ids[chosen] = self._random.choose(filtered, sampling)
            if self.logprobs.processed:
                logits[chosen] = filtered


def _find_broken(peak: Tensor) -> Tensor:
    """Return faults [N] int32 of rows with these largest logits [N]: x - x is NaN unless x is finite."""
    assert (GOOD, BROKEN) == (0, 1)
    return (peak - peak).ne(0).int()
