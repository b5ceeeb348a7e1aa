"""A step in flight: what was launched, and how its result is read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch import AcceleratorError, Tensor

from quire.features.base import Pooled, StepFollower
from quire.ops.arguments import GOOD
from quire.runner.sampler.edits import Masks
from quire.runner.sampler.logprobs import Report, to_top_logprobs
from quire.runner.sampler.pipeline import Sampled
from quire.runner.transfer import Download, Longs
from quire.types.errors import EngineDead, EngineError
from quire.types.plan import NOTHING, Bools, Floats, Ints, StepPlan, StepResult, TopLogprobs, Words, spans
from quire.types.pooling import NOT_FINITE

Array = npt.NDArray[np.generic]
NO_ERRORS: Mapping[int, str] = MappingProxyType({})
BROKEN_PROMPT = "the model's logits are broken at a prompt position: they contain NaN or +inf"


class StepFlight:
    """A step without masked rows has sampled when this is made. One with masked rows samples when it gets the masks.

    The copies to the host are queued after sampling and the step's own work; `result` waits for nothing else.
    """

    def __init__(
        self,
        plan: StepPlan,
        prompts: list[tuple[int, Report]],
        sample: Sampled | Callable[[Masks | None], Sampled] | None,
        pooled: Sequence[Pooled] = (),
        follower: StepFollower | None = None,
        failed: Mapping[int, str] = NO_ERRORS,
    ) -> None:
        """prompts: (row, report) pairs in the order of positions.
        sample: what was sampled, or makes the step's samples, in order.
        pooled: what was pooled of rows.
        follower: goes on when the tokens have reached the host.
        failed: rows whose requests fail, and why.
        """
        self._failed = failed
        self._plan = plan
        self._prompts = prompts
        self._pooled = pooled
        self._follower = follower
        self.before_following: Callable[[Ints], None] | None = None  # called with the tokens per row before the follower
        self.meanwhile: Callable[[float], None] | None = None  # called while the result is awaited (`Download.wait`)
        self._sample = sample
        self._sampled: Sampled | None = None
        self._download: Download | None = None
        self._result: StepResult | None = None
        if not len(plan.masked):
            self._complete(None)

    def sample(self, masks: Words) -> None:
        """masks [masked, W], of the plan's masked samples in order."""
        try:
            self._complete(Masks(self._plan.masked.astype(np.int64), masks))
        except AcceleratorError as error:
            raise device_lost(error) from error

    def _complete(self, masks: Masks | None) -> None:
        sampled = self._sampled = self._sample(masks) if callable(self._sample) else self._sample
        self._sample = None
        tensors: list[Tensor] = [] if sampled is None else [sampled.result]
        tensors += [pooled.values for pooled in self._pooled]
        for report in [*([sampled.report] if sampled and sampled.report else []), *(report for _, report in self._prompts)]:
            tensors += report.tensors
        self._download = Download(tensors)

    @property
    def follows(self) -> bool:
        return self._follower is not None

    def sampled_ids(self) -> Ints | None:
        """Return the token ids of the samples; None: nothing is sampled, or not yet."""
        if self._sampled is None or self._download is None:
            return None
        try:
            result: Ints = self._download.wait(self.meanwhile)[0]  # type: ignore[assignment]
        except AcceleratorError as error:
            raise device_lost(error) from error
        return result[0, : len(self._plan.sample_row)]

    def result(self) -> StepResult:
        """Wait for the step. Raise EngineDead if the device failed: then nothing works in this process any more."""
        try:
            self._result = self._result or self._read()
        except AcceleratorError as error:
            raise device_lost(error) from error
        return self._result

    def _read(self) -> StepResult:
        if self._download is None:
            raise EngineError(f"step {self._plan.step} was awaited before it got its masks")
        arrays = iter(self._download.wait(self.meanwhile))
        plan, sampled = self._plan, self._sampled
        lengths, ids, fault = plan.sample.astype(np.int32), NOTHING, NOTHING
        if sampled is not None:
            ids, fault = next(arrays)[:, slice(len(plan.sample_row)) if sampled.sample_index is None else sampled.sample_index]
        pooled, failed = self._read_pooled(arrays)
        kept: Ints | slice = slice(None)  # the samples that count
        drafts: dict[int, Ints] = {}
        if sampled is not None and plan.shapes.drafted:
            tokens = plan.draft_token if self._follower is None else self._follower.drafts_of(plan)
            lengths[plan.sample] = accept(plan, ids, fault, tokens)
            kept = slice(lengths.item(0)) if len(lengths) == 1 else spans(plan.shapes.first_sample, lengths)
        if np.count_nonzero(fault) and np.count_nonzero(fault[kept]):
            assert sampled is not None
            faults, kept, lengths = _split_failed(plan, fault, kept, sampled.faults)
            failed |= faults
        logprobs: dict[int, TopLogprobs] = {}
        if sampled is not None and sampled.report is not None:
            top = to_top_logprobs(next(arrays), next(arrays), next(arrays))
            counts = np.isin(sampled.reported, np.arange(len(fault))[kept])
            logprobs = _split_rows(top, plan.sample_row[sampled.reported], sampled.widths, counts)
        prompt_logprobs = self._read_prompts(arrays, failed) if self._prompts else {}
        if self._follower is not None:
            drafts = self._follow(self._follower, lengths)
        ids = ids[kept].astype(np.int32, copy=False)
        if self._failed:
            failed |= self._failed
            lost = np.isin(np.arange(len(lengths)), [*self._failed])
            ids, lengths = ids[~lost.repeat(lengths)], np.where(lost, 0, lengths).astype(np.int32)
            logprobs = {row: each for row, each in logprobs.items() if row not in self._failed}
        return StepResult(plan.step, lengths, ids, logprobs, prompt_logprobs, pooled, drafts, failed)

    def _follow(self, follower: StepFollower, lengths: Ints) -> dict[int, Ints]:
        """Launch the follower. Return, by row, the draft tokens of rows with masks, which the host needs for the next masks."""
        plan = self._plan
        if self.before_following is not None:
            self.before_following(lengths)
        follower.follow(plan, lengths)
        masked = np.unique(plan.sample_row[plan.masked]).tolist() if plan.next_drafts else ()
        return {row: follower.expects(int(plan.slot[row]), int(plan.guesses[row])) for row in masked}

    def _read_pooled(self, arrays: Iterator[Array]) -> tuple[dict[int, Floats], dict[int, str]]:
        """Return pooled values by row, and why rows failed."""
        found, failed = dict[int, Floats](), dict[int, str]()
        for pooled in self._pooled:
            values, at = next(arrays).astype(np.float32, copy=False), 0
            finite = bool(np.isfinite(values).all())
            for row, count in pooled.counts.items():
                found[row] = values[at : at + count]
                if not finite and not np.isfinite(found[row]).all():
                    failed[row] = NOT_FINITE
                at += count
        return found, failed

    def _read_prompts(self, arrays: Iterator[Array], failed: dict[int, str]) -> dict[int, TopLogprobs]:
        """Return prompt logprobs by row; add rows with broken logits to `failed` instead."""
        parts_of: dict[int, list[TopLogprobs]] = {}
        for each, _ in self._prompts:
            parts_of.setdefault(each, []).append(to_top_logprobs(next(arrays), next(arrays), next(arrays)))
        joined = {each: _join(parts) for each, parts in parts_of.items()}
        for each, top in list(joined.items()):
            if (np.isnan(top.values) | np.isposinf(top.values)).any():
                failed.setdefault(each, BROKEN_PROMPT)
                del joined[each]
        return joined


def device_lost(error: AcceleratorError) -> EngineDead:
    return EngineDead(f"the device failed: {str(error).splitlines()[0]}")


def accept(plan: StepPlan, ids: Ints, fault: Ints, drafts: Ints) -> Longs:
    """Return the number of tokens that each sampling row brings: the samples up to the first rejected draft.

    ids, fault: [N] of the samples. drafts: [sum of drafts]. A draft is accepted if the sample before it gave that token:

        row       [ newest  draft 1  draft 2  draft 3 ]
        sampled        t1       t2       t3       t4
        accepted     t1       t2       t3                   draft 1 = t1, draft 2 = t2, draft 3 is not t3

    Every sample is what it would be without drafts. The device waits for this: there are few, and lists are faster then.
    """
    sampled, faults, expected = ids.tolist(), fault.tolist(), drafts.tolist()
    lengths, at, first = list[int](), 0, 0
    for sample, count in plan.shapes.each:
        if not sample:
            continue
        accepted = 0
        for draft in expected[first : first + count]:
            if sampled[at + accepted] != draft or faults[at + accepted] != GOOD:
                break
            accepted += 1
        lengths.append(1 + accepted)
        at += 1 + count
        first += count
    return np.array(lengths, np.int64)


def _split_failed(
    plan: StepPlan, fault: Ints, kept: Ints | slice, faults: Mapping[int, str]
) -> tuple[dict[int, str], Ints, Ints]:
    """Return the rows that failed and why, the samples of the other rows, and the number of tokens of each row."""
    row, good = plan.sample_row[kept], fault[kept] == GOOD
    failed = {int(row[i]): faults[int(fault[kept][i])] for i in np.flatnonzero(~good)}
    left = np.arange(len(fault), dtype=np.int32)[kept][good]
    return failed, left, np.bincount(plan.sample_row[left], minlength=len(plan.slot)).astype(np.int32)


def _split_rows(top: TopLogprobs, rows: Ints, widths: Sequence[int], counts: Bools) -> dict[int, TopLogprobs]:
    """Return the accepted ones, one entry per row, each cut to its own width."""
    parts: dict[int, list[TopLogprobs]] = {}
    for i, (row, width) in enumerate(zip(rows.tolist(), widths, strict=True)):
        if counts[i]:
            cut = TopLogprobs(top.ids[i : i + 1, : width + 1], top.values[i : i + 1, : width + 1], top.rank[i : i + 1])
            parts.setdefault(row, []).append(cut)
    return {row: _join(cuts) for row, cuts in parts.items()}


def _join(parts: list[TopLogprobs]) -> TopLogprobs:
    if len(parts) == 1:
        return parts[0]
    return TopLogprobs(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.rank for part in parts]),
    )
