"""A step on its way: what was launched, and how its result is read once it has landed."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from quire.ops.sample import GOOD
from quire.runner.sampler.grammar import Masks
from quire.runner.sampler.logprobs import Report, to_top_logprobs
from quire.runner.sampler.pipeline import FAULTS, Drawn
from quire.runner.transfer import Download, Longs
from quire.types.errors import EngineError
from quire.types.plan import StepPlan, StepResult, TopLogprobs, Words

NO_TOKEN = -1
BROKEN_PROMPT = "the model's logits are broken at a prompt position: they contain NaN or +inf"


class StepFlight:
    """A step whose rows all draw freely has drawn when this is made. One with masked rows draws when it gets the masks.

    The copies to the host are queued at the draw, behind the step's own work; `result` waits for them alone.
    """

    def __init__(
        self, plan: StepPlan, prompts: list[tuple[int, Report]], draw: Drawn | Callable[[Masks | None], Drawn] | None
    ) -> None:
        """`draw` is for the rows that sample, in order, or what they drew; `prompts` are (row, report) pieces in the order of
        positions."""
        self._plan = plan
        self._prompts = prompts
        self._draw = draw
        self._drawn: Drawn | None = None
        self._download: Download | None = None
        self._result: StepResult | None = None
        if not len(plan.masked):
            self._complete(None)

    def draw(self, masks: Words) -> None:
        """masks [masked, W], of the plan's masked rows in order."""
        drawing = np.cumsum(self._plan.sample) - 1  # index among the rows that draw
        self._complete(Masks(drawing[self._plan.masked], masks))

    def _complete(self, masks: Masks | None) -> None:
        drawn = self._drawn = self._draw(masks) if callable(self._draw) else self._draw
        self._draw = None
        tensors: list[Tensor] = [] if drawn is None else [drawn.result]
        for report in [*([drawn.report] if drawn and drawn.report else []), *(report for _, report in self._prompts)]:
            tensors += report.tensors
        self._download = Download(tensors)

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        if self._download is None:
            raise EngineError(f"step {self._plan.step} was awaited before it got its masks")
        arrays = iter(self._download.wait())
        sampled = np.full(len(self._plan.slot), NO_TOKEN, np.int32)
        failed: dict[int, str] = {}
        logprobs: dict[int, TopLogprobs] = {}
        if self._drawn is not None:
            rows = np.flatnonzero(self._plan.sample)
            column = rows if self._drawn.of_all else slice(len(rows))
            ids, fault = next(arrays)[:, column]
            good = fault == GOOD
            sampled[rows[good]] = ids[good]
            failed = {int(rows[i]): FAULTS[int(fault[i])] for i in np.flatnonzero(~good)}
            if self._drawn.report is not None:
                top = to_top_logprobs(next(arrays), next(arrays), next(arrays))
                logprobs = _split_rows(top, rows[self._drawn.reported], self._drawn.widths)
        pieces: dict[int, list[TopLogprobs]] = {}
        for row, _ in self._prompts:
            pieces.setdefault(row, []).append(to_top_logprobs(next(arrays), next(arrays), next(arrays)))
        prompt_logprobs = {row: _join(parts) for row, parts in pieces.items()}
        for row, top in prompt_logprobs.items():
            if (np.isnan(top.values) | np.isposinf(top.values)).any():
                failed.setdefault(row, BROKEN_PROMPT)
        return StepResult(
            step=self._plan.step,
            sampled=sampled,
            logprobs={row: top for row, top in logprobs.items() if row not in failed},
            prompt_logprobs={row: top for row, top in prompt_logprobs.items() if row not in failed},
            failed=failed,
        )


def _split_rows(top: TopLogprobs, rows: Longs, widths: Sequence[int]) -> dict[int, TopLogprobs]:
    """One entry per row, each cut to its own width."""
    return {
        int(row): TopLogprobs(top.ids[i : i + 1, : width + 1], top.values[i : i + 1, : width + 1], top.rank[i : i + 1])
        for i, (row, width) in enumerate(zip(rows, widths, strict=True))
    }


def _join(parts: list[TopLogprobs]) -> TopLogprobs:
    return TopLogprobs(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.rank for part in parts]),
    )
