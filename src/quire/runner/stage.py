"""A runner whose model is one stage of a pipeline.

    first stage    apply the plan, embed, own layers ─► ...             ... ─► norm and head, sample: `finish`
    other stages   apply the plan ─► receive hidden states, own layers, send hidden states

All stages get all plans, in the same order. Between the start of a step and its end the first stage may start other steps. Only
the first stage knows token values. CUDA graphs contain a stage's layers (`graphs.py`); hidden states are sent and
received, and tokens are sampled, outside of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.dist.stages import Ring
from quire.models.decoder import Decoder
from quire.prepare.stage import take_stage
from quire.runner.batch import Built, build_batch, samples_batch, samples_of
from quire.runner.flight import StepFlight
from quire.runner.graphs import StageBuffers
from quire.runner.sampler.stage import Rows
from quire.runner.step import Runner, StepOutputs
from quire.runner.transfer import Longs, upload
from quire.types.cache import LayerCache
from quire.types.errors import EngineError
from quire.types.plan import Ints, StepPlan, StepRows


@dataclass(frozen=True)
class BegunStep:
    """A step whose hidden states are passing through the other stages."""

    plan: StepPlan
    run: StepRows | None = None  # its rows; None: it has none, and nothing was sent
    owner: Longs | None = None  # [rows] the plan's row of each, if they are not the plan's
    built: Built | None = None  # None: a CUDA graph was replayed
    sampled_from: Batch | None = None  # the tokens that it samples after, if a graph was replayed

    @property
    def kept(self) -> int:
        """Return the number of hidden states that the last stage sends."""
        assert self.run is not None
        return max(1, len(self.run.outputs.sample_after)) if self.built is None else len(self.built.batch.final.ids)


class StageRunner(Runner):
    """A runner of one pipeline stage."""

    def __init__(
        self,
        *args: Any,
        ring: Ring,
        layers: Sequence[LayerCache],
        whole: bool = False,
        **options: Any,
    ) -> None:
        """layers: what this rank's cache holds of each layer of its stage.
        whole: the last stage returns the states of all tokens, for a drafter of the first.

        The rest is as in Runner.
        """
        super().__init__(*args, position=ring.own.position, group=ring.group, **options)
        self._pipeline_rank, self._stage, self._layers = ring.own, ring.own.stage, tuple(layers)
        self._others, self._ends = ring.others, ring.ends
        self._all_kept = whole
        self._buffers: StageBuffers | None = None  # of replayed steps
        self._entered = 0  # tokens of the latest replayed step
        self._unsampled: dict[int, Rows] = {}  # step -> its samples, whose tokens another rank of the first stage reports

    def _build(self) -> Decoder:
        model = super()._build()
        for part in self._parts:
            part.before_cut(model)
        take_stage(model, self._stage)
        return model

    @property
    def finishes(self) -> bool:
        """Whether the last stage sends its output here."""
        return self._stage.first

    def launch(self, plan: StepPlan) -> StepFlight:
        """Run one step alone, on all ranks."""
        begun = self.begin(plan)
        return self.finish(begun) if self.finishes else StepFlight(plan, [], None)

    def close(self) -> None:
        self._ends.close()
        self._buffers = None
        self._unsampled.clear()
        super().close()

    def warm_up(self) -> None:
        self._ends.barrier()
        super().warm_up()

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> BegunStep:
        """Run the rows through this stage's layers."""
        slots = self._take_in(plan).slots
        if not len(plan.slot):
            return BegunStep(plan)
        run, owner = self._arrange(plan)
        begun = self._replay_stage(plan, run, owner)
        if begun is None:
            built, model = build_batch(run, slots, self._parts, whole=self._all_kept), self._loaded()
            batch = built.batch if self._stage.last else replace(built.batch, logit_tokens=None)
            x = model.embed(batch) if self._stage.first else self._await(plan, run)
            self._ends.outlet.send(model.body(x, batch))
            begun = BegunStep(plan, run, owner, built)
        self._advance(plan, slots)
        return begun

    def _await(self, plan: StepPlan, run: StepRows) -> Tensor:
        """Return the previous stage's output [T, H]."""
        x = self._ends.inlet.receive(self._others)
        if len(x) != run.tokens:
            raise EngineError(f"step {plan.step} has {run.tokens} tokens, but received hidden states of {len(x)}")
        return x

    def _replay_stage(self, plan: StepPlan, run: StepRows, owner: Longs | None) -> BegunStep | None:
        """Replay a CUDA graph of the stage's layers. None: run the step eagerly."""
        graphs, buffers = self.graphs, self._buffers
        if graphs is None or buffers is None or run.tokens > len(buffers.exit):
            return None
        keys = self._graph_keys(run)
        if keys is None or not graphs.replay_stage(run, lambda: self._fill_entry(buffers, plan, run), keys):
            return None
        assert self._state is not None
        sampled_from = samples_batch(run, self._state.slots, self._parts) if self.finishes else None
        self._ends.outlet.send(self._stage_output(buffers, run))
        return BegunStep(plan, run, owner, sampled_from=sampled_from)

    def _fill_entry(self, buffers: StageBuffers, plan: StepPlan, run: StepRows) -> None:
        if buffers.entry is not None:
            buffers.entry[: run.tokens].copy_(self._await(plan, run))
            if run.tokens < self._entered:  # padding runs as well, and must not be NaN from an earlier step
                buffers.entry[run.tokens : self._entered].zero_()
            self._entered = run.tokens

    def _stage_output(self, buffers: StageBuffers, run: StepRows) -> Tensor:
        """Return [K, H] what a replayed step sends: all tokens, or after the last layer those that are sampled from."""
        if not buffers.last:
            return buffers.exit[: run.tokens]
        if run.shapes.all_sample:
            return buffers.exit[: len(run.slot)]
        if not len(run.sample_row):
            return buffers.exit[:1]
        return buffers.exit[upload(run.sample_row.astype(np.int64), buffers.exit.device)]

    def _stage_buffers(self) -> StageBuffers:
        self._entered = 0
        device = self._device.torch_device
        self._buffers = StageBuffers.of(self._stage, self._facts.hidden_size, self._dtype, device)
        return self._buffers

    def _enter(self, batch: Batch) -> Tensor:
        if self._stage.first:
            return super()._enter(batch)
        return torch.zeros(len(batch.ids), self._facts.hidden_size, dtype=self._dtype, device=batch.ids.device)

    @torch.inference_mode()
    def finish(self, begun: BegunStep) -> StepFlight:
        """On the first stage: receive the last stage's output. Steps are finished in the order in which they were begun."""
        if begun.run is None:
            return StepFlight(begun.plan, [], None)
        hidden = self._ends.inlet.receive(self._others)
        if len(hidden) != begun.kept:
            raise EngineError(f"step {begun.plan.step} kept {begun.kept} tokens, but received hidden states of {len(hidden)}")
        built = begun.built
        outputs = self._sample_replayed(begun, hidden) if built is None else self._outputs(begun.run, built, hidden)
        flight = self._fly(begun.plan, begun.run, begun.owner, outputs)
        if self._pending is not None and not self.samples_itself(begun.plan):
            self._unsampled[begun.plan.step] = self._pending
        return flight

    def _sample_replayed(self, begun: BegunStep, hidden: Tensor) -> StepOutputs:
        """Return the outputs of a replayed step; hidden [K, H] of the samples, or of one unused token."""
        assert self._state is not None and begun.run is not None and begun.sampled_from is not None
        samples = samples_of(begun.run, self._state.slots)
        return StepOutputs(self._prepare_sample(hidden[: len(samples.slots)], samples, begun.sampled_from, None))

    @torch.inference_mode()
    def take_sampled_of(self, step: int, ids: Ints) -> None:
        """Write the tokens that the first rank of the first stage sampled in `step`, before the next step begins."""
        rows = self._unsampled.pop(step, None)
        if rows is None or len(ids) != len(rows.slots):
            raise EngineError(
                f"got {len(ids)} sampled tokens for {0 if rows is None else len(rows.slots)} samples of step {step}"
            )
        rows.tokens[rows.slot, rows.end] = upload(ids, rows.tokens.device)

    def take_sampled(self, ids: Ints) -> None:
        """As in Runner, if a drafter follows the latest step."""
        if self._launched is not None and (len(ids) or self._launched.step in self._unsampled):
            self.take_sampled_of(self._launched.step, ids)

    @property
    def share(self) -> str:
        own = self._stage.own
        return f"{super().share}, layers {own.start} to {own.stop}"

    def describe_rank(self) -> dict[str, int]:
        rank, own = self._pipeline_rank, self._stage.own
        position = {
            "rank": rank.rank,
            "ranks": rank.world,
            "stage": rank.stage.index,
            "first_layer": own.start,
            "layers": len(own),
        }
        return super().describe_rank() | position
