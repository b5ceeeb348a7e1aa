"""A runner whose model is one stage of a pipeline.

    first stage    take in the plan, embed, own layers ─► ...           ... ─► norm and head, draw: `finish`
    another        take in the plan ─► hidden states come, own layers, hidden states go

A plan comes to all stages, in the same order; between the start of a step and its end the first stage may start others. Token
values are known to the first stage alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.dist.ring import Ring
from quire.models.decoder import Decoder
from quire.prepare.adapt import find_sites
from quire.prepare.stage import keep_stage
from quire.runner.adapters import WholeModel
from quire.runner.batch import Built, build_batch
from quire.runner.flight import StepFlight
from quire.runner.sampler.stage import Rows
from quire.runner.step import Runner
from quire.runner.transfer import upload
from quire.types.cache import LayerCache
from quire.types.errors import EngineError
from quire.types.plan import Ints, StepPlan


@dataclass(frozen=True)
class Begun:
    """A step whose hidden states are on their way through the other stages."""

    plan: StepPlan
    built: Built | None  # None = it has no rows, and nothing is on its way


class StageRunner(Runner):
    def __init__(self, *args: Any, ring: Ring, layers: Sequence[LayerCache], whole: bool = False, **options: Any) -> None:
        """`layers`: what this rank's cache holds of each of its stage's. `whole`: the last stage's states of all tokens are
        wanted, for a drafter of the first. The rest is as a Runner has it."""
        super().__init__(*args, position=ring.seat.position, group=ring.group, **options)
        self._seat, self._stage, self._layers = ring.seat, ring.seat.stage, tuple(layers)
        self._others, self._inlet, self._outlet = ring.others, ring.inlet, ring.outlet
        self._all_kept = whole
        self._undrawn: dict[int, Rows] = {}  # step -> its draws, where another rank of the first stage makes them

    def _build(self) -> Decoder:
        model = super()._build()
        if self._room[0]:  # what is wrong with an adapter is found by every stage, wherever it belongs
            self._whole = WholeModel(
                find_sites(model, self._more), model.renames, {name for name, _ in model.named_parameters()}
            )
        keep_stage(model, self._stage)
        return model

    @property
    def finishes(self) -> bool:
        """Does what comes out of the last stage come here?"""
        return self._stage.first

    def launch(self, plan: StepPlan) -> StepFlight:
        """One step alone, on all ranks."""
        begun = self.begin(plan)
        return self.finish(begun) if self.finishes else StepFlight(plan, [], None)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Begun:
        """Runs the rows through this stage's layers."""
        slots, _ = self._take_in(plan)
        if not len(plan.slot):
            return Begun(plan, None)
        model, parts = self._loaded(), [part for part in self._parts if part.active(plan.slot)]
        built = build_batch(plan, slots, parts, whole=self._all_kept)
        batch = built.batch if self._stage.last else replace(built.batch, kept=None)
        x = model.embed(batch) if self._stage.first else self._inlet.receive(self._others)
        if len(x) != len(batch.ids):
            raise EngineError(f"step {plan.step} has {len(batch.ids)} tokens, but hidden states of {len(x)} came")
        self._outlet.send(model.body(x, batch))
        slots.advance(plan)
        return Begun(plan, built)

    @torch.inference_mode()
    def finish(self, begun: Begun) -> StepFlight:
        """On the first stage: waits for what the last one gave. Steps are finished in the order in which they were begun."""
        if begun.built is None:
            return StepFlight(begun.plan, [], None)
        hidden = self._inlet.receive(self._others)
        if len(hidden) != len(begun.built.batch.final.ids):
            raise EngineError(f"hidden states of {len(hidden)} tokens came out of step {begun.plan.step}, which kept others")
        flight = StepFlight(begun.plan, *self._take_out(begun.plan, begun.built, hidden), self._guessing)
        self._launched = begun.plan
        if self._untold is not None:
            self._undrawn[begun.plan.step] = self._untold
        return flight

    @torch.inference_mode()
    def take_drawn_of(self, step: int, ids: Ints) -> None:
        """The first of the ranks of the first stage draws; the others are told before the next step begins."""
        rows = self._undrawn.pop(step, None)
        if rows is None or len(ids) != len(rows.slots):
            raise EngineError(f"{len(ids)} drawn tokens came for {0 if rows is None else len(rows.slots)} draws of step {step}")
        rows.tokens[rows.slot, rows.end] = upload(ids, rows.tokens.device)

    def take_drawn(self, ids: Ints) -> None:
        """Of the latest step, where a drafter goes on behind it."""
        if self._launched is not None and (len(ids) or self._launched.step in self._undrawn):
            self.take_drawn_of(self._launched.step, ids)

    def describe_rank(self) -> dict[str, int]:
        seat, own = self._seat, self._stage.own
        place = {
            "rank": seat.rank,
            "ranks": seat.world,
            "stage": seat.stage.index,
            "first_layer": own.start,
            "layers": len(own),
        }
        return super().describe_rank() | place
