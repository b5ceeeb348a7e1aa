"""A step on its way: what was launched, and how its result is read once it has landed."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.ops.arguments import GOOD
from quire.runner.draft.base import Guessing
from quire.runner.draft.verify import accept_told
from quire.runner.sampler.grammar import Masks
from quire.runner.sampler.logprobs import Report, to_top_logprobs
from quire.runner.sampler.pipeline import FAULTS, Drawn
from quire.runner.transfer import Download, Longs
from quire.types.errors import EngineError
from quire.types.plan import NOTHING, Bools, Floats, Ints, StepPlan, StepResult, TopLogprobs, Words, spans

Array = npt.NDArray[np.generic]
BROKEN_PROMPT = "the model's logits are broken at a prompt position: they contain NaN or +inf"


class StepFlight:
    """A step whose rows all draw freely has drawn when this is made. One with masked rows draws when it gets the masks.

    The copies to the host are queued at the draw, behind the step's own work; `result` waits for them alone.
    """

    def __init__(
        self,
        plan: StepPlan,
        prompts: list[tuple[int, Report]],
        draw: Drawn | Callable[[Masks | None], Drawn] | None,
        pooled: Tensor | None = None,
        guessing: Guessing | None = None,
    ) -> None:
        """`draw` makes the step's draws, in order, or is what was drawn; `prompts` are (row, report) pieces in the order of
        positions; pooled [pool, H]. `guessing`: a drafter goes on when the result is there."""
        self._plan = plan
        self._prompts = prompts
        self._pooled = pooled
        self._guessing = guessing
        self.before_guessing: Callable[[Ints], None] | None = None  # is told how many tokens the rows brought
        self.meanwhile: Callable[[float], None] | None = None  # is asked while the result is waited for (`Download.wait`)
        self._draw = draw
        self._drawn: Drawn | None = None
        self._download: Download | None = None
        self._result: StepResult | None = None
        if not len(plan.masked):
            self._complete(None)

    def draw(self, masks: Words) -> None:
        """masks [masked, W], of the plan's masked draws in order."""
        self._complete(Masks(self._plan.masked.astype(np.int64), masks))

    def _complete(self, masks: Masks | None) -> None:
        drawn = self._drawn = self._draw(masks) if callable(self._draw) else self._draw
        self._draw = None
        tensors: list[Tensor] = [] if drawn is None else [drawn.result]
        guesses = None if drawn is None or not len(self._plan.masked) else drawn.guesses
        lengths = None if drawn is None else drawn.lengths
        tensors += [tensor for tensor in (self._pooled, lengths, guesses) if tensor is not None]
        for report in [*([drawn.report] if drawn and drawn.report else []), *(report for _, report in self._prompts)]:
            tensors += report.tensors
        self._download = Download(tensors)

    def drawn_ids(self) -> Ints | None:
        """What the step drew, draw by draw; None = nothing, or not yet."""
        if self._drawn is None or self._download is None:
            return None
        result: Ints = self._download.wait(self.meanwhile)[0]  # type: ignore[assignment]
        return result[0, : len(self._plan.draw_row)]

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        if self._download is None:
            raise EngineError(f"step {self._plan.step} was awaited before it got its masks")
        arrays = iter(self._download.wait(self.meanwhile))
        plan, drawn = self._plan, self._drawn
        lengths, ids, fault = plan.sample.astype(np.int32), NOTHING, NOTHING
        if drawn is not None:
            ids, fault = next(arrays)[:, slice(len(plan.draw_row)) if drawn.places is None else drawn.places]
        pooled = {} if self._pooled is None else _split_pooled(plan, next(arrays))
        kept: Ints | slice = slice(None)  # the draws that count
        if drawn is not None and (drawn.lengths is not None or plan.shapes.drafted):
            lengths[plan.sample] = self._accept(ids, fault) if drawn.lengths is None else next(arrays)
            kept = slice(lengths.item(0)) if len(lengths) == 1 else spans(plan.shapes.first_draw, lengths)
        drafts = {} if drawn is None or drawn.guesses is None or not len(plan.masked) else _split_guesses(plan, next(arrays))
        failed: dict[int, str] = {}
        if np.count_nonzero(fault) and np.count_nonzero(fault[kept]):
            failed, kept, lengths = _leave_out(plan, fault, kept)
        logprobs: dict[int, TopLogprobs] = {}
        if drawn is not None and drawn.report is not None:
            top = to_top_logprobs(next(arrays), next(arrays), next(arrays))
            counts = np.isin(drawn.reported, np.arange(len(fault))[kept])
            logprobs = _split_rows(top, plan.draw_row[drawn.reported], drawn.widths, counts)
        prompt_logprobs = self._read_prompts(arrays, failed) if self._prompts else {}
        if self._guessing is not None:
            drafts = self._go_on(self._guessing, lengths)
        ids = ids[kept].astype(np.int32, copy=False)
        return StepResult(plan.step, lengths, ids, logprobs, prompt_logprobs, pooled, drafts, failed)

    def _accept(self, ids: Ints, fault: Ints) -> Longs:
        plan = self._plan
        told = plan.draft_token if self._guessing is None else self._guessing.drafter.guessed(plan)
        return accept_told(plan, ids, fault, told)

    def _go_on(self, guessing: Guessing, lengths: Ints) -> dict[int, Ints]:
        """The next guesses are launched; those of rows with masks are waited for."""
        plan = self._plan
        if self.before_guessing is not None:
            self.before_guessing(lengths)
        guessing.follow(plan, lengths)
        masked = np.unique(plan.draw_row[plan.masked]).tolist() if plan.ahead else ()
        return {row: guessing.drafter.expects(int(plan.slot[row]), int(plan.guesses[row])) for row in masked}

    def _read_prompts(self, arrays: Iterator[Array], failed: dict[int, str]) -> dict[int, TopLogprobs]:
        """By rows; those whose logits are broken are `failed` instead."""
        pieces: dict[int, list[TopLogprobs]] = {}
        for each, _ in self._prompts:
            pieces.setdefault(each, []).append(to_top_logprobs(next(arrays), next(arrays), next(arrays)))
        joined = {each: _join(parts) for each, parts in pieces.items()}
        for each, top in list(joined.items()):
            if (np.isnan(top.values) | np.isposinf(top.values)).any():
                failed.setdefault(each, BROKEN_PROMPT)
                del joined[each]
        return joined


def _split_pooled(plan: StepPlan, pooled: Array) -> dict[int, Floats]:
    states, owner = pooled.astype(np.float32), plan.shapes.rows_of(plan.outputs.pool)
    return {each: states[owner == each] for each in owner.tolist()}


def _split_guesses(plan: StepPlan, guesses: Array) -> dict[int, Ints]:
    """What masked rows are expected to draw next."""
    expected = dict(zip(np.flatnonzero(plan.sample).tolist(), guesses, strict=True))
    return {each: expected[each].astype(np.int32) for each in plan.draw_row[plan.masked].tolist()}


def _leave_out(plan: StepPlan, fault: Ints, kept: Ints | slice) -> tuple[dict[int, str], Ints, Ints]:
    """The rows that failed and why, the draws that count without theirs, and how many each row then has."""
    row, good = plan.draw_row[kept], fault[kept] == GOOD
    failed = {int(row[i]): FAULTS[int(fault[kept][i])] for i in np.flatnonzero(~good)}
    left = np.arange(len(fault), dtype=np.int32)[kept][good]
    return failed, left, np.bincount(plan.draw_row[left], minlength=len(plan.slot)).astype(np.int32)


def _split_rows(top: TopLogprobs, rows: Ints, widths: Sequence[int], counts: Bools) -> dict[int, TopLogprobs]:
    """Those that count, one entry per row, each cut to its own width."""
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
