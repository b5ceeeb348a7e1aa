"""A step on its way: what was launched, and how its result is read once it has landed."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire.ops.sample import GOOD
from quire.runner.sampler.logprobs import Report, to_top_logprobs
from quire.runner.sampler.pipeline import FAULTS, Drawn
from quire.runner.transfer import Download, Longs
from quire.types.plan import StepPlan, StepResult, TopLogprobs

NO_TOKEN = -1
BROKEN_PROMPT = "the model's logits are broken at a prompt position: they contain NaN or +inf"


class StepFlight:
    """The copies to the host were queued when this was made, behind the step's own work; `result` waits for them alone."""

    def __init__(self, plan: StepPlan, drawn: Drawn | None, prompts: list[tuple[int, Report]]) -> None:
        """`drawn` is for the rows that sample, in order; `prompts` are (row, report) pieces in the order of positions."""
        self._plan = plan
        self._drawn = drawn
        self._prompts = prompts
        tensors: list[Tensor] = [] if drawn is None else [drawn.result]
        for report in [*([drawn.report] if drawn and drawn.report else []), *(report for _, report in prompts)]:
            tensors += report.tensors
        self._download = Download(tensors)
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
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
