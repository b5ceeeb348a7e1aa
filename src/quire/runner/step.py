"""The runner turns step plans into flights.

It does what the plan says, in the plan's order, and decides nothing. It knows slots, not requests. It names no feature: it
calls the parts of features (`features/base.py`) in their order.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.features.base import FinishedStep, Pooled, StepFollower
from quire.models.decoder import Decoder
from quire.runner.batch import Built, build_batch
from quire.runner.core import RunnerCore, SlotState
from quire.runner.flight import StepFlight
from quire.runner.graphs import Graphs, PendingSample, recordable
from quire.runner.sampler.edits import Masks
from quire.runner.sampler.logprobs import Report
from quire.runner.sampler.pipeline import Sampled, Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import Longs, upload, upload_together
from quire.types.errors import EngineError
from quire.types.plan import Ints, StepPlan, StepRows

PROMPT_CHUNK = 256  # prompt positions whose logits are held at a time
# what a step sampled, or how it samples; None: nothing, or on another rank
Samples = Sampled | Callable[[Masks | None], Sampled] | None


class StepOutputs(NamedTuple):
    """What a step computed."""

    samples: Samples
    prompts: Sequence[tuple[int, Report]] = ()  # (row, prompt logprobs), in the order of positions
    pooled: Sequence[Pooled] = ()
    hidden: Tensor | None = None  # [kept tokens, H]; None: a CUDA graph was replayed
    sampled_from: Tensor | None = None  # [samples, H]


class Runner(RunnerCore):
    """Run step plans.

    A launch that raises has applied the plan's retirements, admissions and table entries, but has run no row: slots are
    unchanged, and the next plan may be launched.
    """

    _pending: Rows | None = None  # samples of the latest step, whose tokens another rank reports
    _launched: StepPlan | None = None  # the latest step
    _follower: StepFollower | None = None  # of the latest step

    def _free_slots(self) -> None:
        super()._free_slots()
        self._pending = self._launched = self._follower = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepFlight:
        slots, _, sampler = self._take_in(plan)
        if not len(plan.slot):
            return StepFlight(plan, [], None)
        rows, owner = self._arrange(plan)
        plain = not len(plan.masked) and sampler.plain(plan.slot) and (self._group is None or self._samples_alike)
        outputs = None if self.graphs is None else self._replay(self.graphs, rows, plain)
        if outputs is None:
            built = build_batch(rows, slots, self._parts, whole=any(part.reads_all_tokens for part in self._parts))
            outputs = self._outputs(rows, built, self._loaded()(built.batch))
        self._advance(plan, slots)
        if self.samples_itself(plan):
            self._pending = None
        return self._fly(plan, rows, owner, outputs)

    def _take_in(self, plan: StepPlan) -> SlotState:
        """Apply everything of a plan except its rows."""
        self._loaded()
        self._use_order()
        if self._state is None:
            raise EngineError("a step was launched before the cache was allocated")
        slots, kv, sampler = self._state
        slots.updates.deliver()  # left by a failed launch
        slots.take_in(plan)
        if plan.admitted or len(plan.retired):
            self._admit(plan, sampler)
        sampler.columns.refresh(slots.updates)
        for part in self._parts:
            part.prepare(plan)
        if len(plan.copy_from):
            kv.copy(plan.copy_from, plan.copy_to)
        if len(plan.slot):
            slots.check(plan)
            self._device.note(plan.tokens)
        else:
            slots.updates.deliver()
        return self._state

    def _admit(self, plan: StepPlan, sampler: Sampler) -> None:
        for slot in plan.retired.tolist():
            sampler.retire(slot)
            for part in self._parts:
                part.retire(slot)
        for admission in plan.admitted:
            if admission.samples:
                sampler.admit(admission.slot, admission)
            for part in self._parts:
                part.retire(admission.slot)
                part.admit(admission.slot, admission)
        missing = {name for each in plan.admitted for name in each.extras.features} - {part.name for part in self._parts}
        if missing:
            raise EngineError(f"a request requires {', '.join(sorted(missing))}; the engine was started without it")

    def _arrange(self, plan: StepPlan) -> tuple[StepRows, Longs | None]:
        """Return the rows to run, and [rows] the plan's row of each, if they are not the plan's."""
        for part in self._parts:
            if (arranged := part.arrange(plan, self._run_before)) is not None:
                return arranged
        return plan, None

    def _run_before(self, rows: StepRows) -> None:
        assert self._state is not None
        self._loaded()(build_batch(rows, self._state.slots, self._parts).batch)

    def _advance(self, plan: StepPlan, slots: Slots) -> None:
        """Note that the plan's rows have run through the layers of this rank."""
        slots.advance(plan)
        for part in self._parts:
            part.after_layers(plan)

    def _graph_keys(self, rows: StepRows) -> tuple[Hashable, ...] | None:
        """Return the key of each part; None: no graph can run these rows."""
        keys = tuple(part.graph_key(rows) for part in self._parts)
        pools = self.graphs is not None and self.graphs.states is not None
        return keys if None not in keys and recordable(rows, pools) else None

    def _replay(self, graphs: Graphs, rows: StepRows, plain: bool) -> StepOutputs | None:
        """Run a CUDA graph. None: run the step eagerly."""
        keys = self._graph_keys(rows)
        if keys is not None and graphs.states is not None:
            return self._replay_states(graphs, graphs.states, rows, keys)
        replayed = None if keys is None else graphs.run(rows, plain, keys)
        if replayed is None:
            return None
        if isinstance(replayed, PendingSample):
            self._pending = None
            return StepOutputs(self._sample_from(replayed.logits, replayed.rows) if len(replayed.rows.slots) else None)
        return StepOutputs(Sampled(replayed, sample_index=None if rows.shapes.all_sample else rows.sample_row))

    def _replay_states(self, graphs: Graphs, states: Tensor, rows: StepRows, keys: tuple[Hashable, ...]) -> StepOutputs | None:
        """Run a CUDA graph of a model that pools. None: run the step eagerly."""
        if not graphs.replay_stage(rows, lambda: None, keys):
            return None
        pool = rows.outputs.pool.astype(np.int64)
        return StepOutputs(None, pooled=self._pool(rows, states[: rows.tokens], pool) if len(pool) else ())

    def _outputs(self, rows: StepRows, built: Built, hidden: Tensor) -> StepOutputs:
        """Return what the rows output; hidden [K, H] of the tokens that the batch keeps."""
        assert self._state is not None
        (slots, _, sampler), model, outputs = self._state, self._loaded(), rows.outputs
        prompts = report_prompts(rows, built, hidden, model, slots, sampler) if len(outputs.prompt_logprobs) else []
        pooled = self._pool(rows, hidden, final_states(outputs.pool, rows, built)) if len(outputs.pool) else ()
        sampled_from = hidden[built.batch.logit_index] if len(outputs.sample_after) else hidden[:0]
        samples = self._prepare_sample(sampled_from, built.rows, built.batch, outputs.sample_after)
        return StepOutputs(samples, prompts, pooled, hidden, sampled_from)

    def _pool(self, rows: StepRows, hidden: Tensor, index: Longs) -> Sequence[Pooled]:
        for part in self._parts:
            if (pooled := part.pool(rows, hidden, index)) is not None:
                return pooled
        raise EngineError("a step has hidden states to pool, but the engine was started without pooling")

    def _prepare_sample(self, hidden: Tensor, rows: Rows, batch: Batch, tokens: Ints | None) -> Samples:
        """hidden [N, H] of the samples, tokens [N] their indices in the batch (None: all)."""
        self._pending = None
        if not len(hidden):
            return None
        logits = self._loaded().logits(hidden, batch.tokens if tokens is None else batch.tokens.take(tokens))
        return self._sample_from(logits, rows)

    def _sample_from(self, logits: Tensor, rows: Rows) -> Samples:
        """logits [N, V] of the samples. Where only the first rank samples, the others note whose tokens it will send."""
        first = self._position.rank == 0
        self._pending = None if first else rows
        return partial(self._sample, logits, rows) if first or self._samples_alike else None

    @torch.inference_mode()
    def _sample(self, logits: Tensor, rows: Rows, masks: Masks | None) -> Sampled:
        """logits [N, V] of the samples. Called before the next launch."""
        assert self._state is not None
        return self._state.sampler.sample(logits, rows, masks)

    def _fly(self, plan: StepPlan, rows: StepRows, owner: Longs | None, outputs: StepOutputs) -> StepFlight:
        """Call the parts for the finished step and return its flight."""
        finished = FinishedStep(plan, rows, outputs.hidden, outputs.sampled_from)
        followers = [part.finish(finished) for part in self._parts]
        self._follower = next((follower for follower in followers if follower is not None), None)
        self._launched = plan
        prompts = [(row if owner is None else int(owner[row]), report) for row, report in outputs.prompts]
        failed = {row: reason for part in self._parts for row, reason in part.failed(plan).items()}
        return StepFlight(plan, prompts, outputs.samples, outputs.pooled, self._follower, failed)

    # ---- several ranks ---------------------------------------------------------------------------------------------------

    def samples_itself(self, plan: StepPlan) -> bool:
        """Return whether every rank samples in this step. All have bit-identical logits, but only the first has masks."""
        return self._samples_alike and not len(plan.masked)

    @property
    def _samples_alike(self) -> bool:
        return self._device.samples_alike and not any(part.samples_on_one_rank for part in self._parts)

    @torch.inference_mode()
    def take_sampled(self, ids: Ints) -> None:
        """Write the tokens that the first rank sampled in the latest step, before the next is launched."""
        rows, self._pending = self._pending, None
        if rows is None and not len(ids):
            return
        if rows is None or len(ids) != len(rows.slots):
            raise EngineError(f"got {len(ids)} sampled tokens for {0 if rows is None else len(rows.slots)} samples")
        rows.tokens[rows.slot, rows.end] = upload(ids, rows.tokens.device)

    def complete(self, plan: StepPlan) -> StepPlan:
        """Return the plan with values that only the first rank knows, for the other ranks."""
        for part in self._parts:
            plan = part.complete(plan)
        return plan

    def follow(self, lengths: Ints) -> None:
        """Run the drafter after the latest step, as the first rank does. lengths [R]: accepted tokens of its rows."""
        if self._follower is not None and self._launched is not None:
            self._follower.follow(self._launched, lengths)


def final_states(tokens: Ints, plan: StepRows, built: Built) -> Longs:
    """Return the indices of these tokens of the step among the kept hidden states."""
    return tokens + built.shift[plan.shapes.rows_of(tokens)]


def report_prompts(
    plan: StepRows, built: Built, hidden: Tensor, model: Decoder, slots: Slots, sampler: Sampler
) -> list[tuple[int, Report]]:
    """Return the logprobs of prompt tokens, PROMPT_CHUNK positions at a time."""
    tokens, reports = plan.outputs.prompt_logprobs, []
    rows, final = plan.shapes.rows_of(tokens), final_states(tokens, plan, built)
    for row in np.unique(rows).tolist():
        index, slot = np.flatnonzero(rows == row), int(plan.slot[row])
        for first in range(0, len(index), PROMPT_CHUNK):
            piece = index[first : first + PROMPT_CHUNK]
            states, at = upload_together([final[piece], tokens[piece]], slots.device)
            targets = slots.tokens[slot, built.batch.positions[at] + 1].long()
            logits = model.logits(hidden[states], built.batch.tokens.take(tokens[piece]))
            reports.append((row, sampler.logprobs.of_prompt(logits, targets, slot)))
    return reports
