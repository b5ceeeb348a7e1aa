"""The executor and the ranks of pipeline parallelism: stages of one rank or of several.

    this process    begin 1 │ begin 2 │ finish 1 │ begin 3 │ finish 2 │ ...
    stage 1                 │ 1 ........ │ 2 ........ │ 3 ........ │

Every plan goes to all ranks. A step begins when it is submitted. It finishes when its result is awaited, or before a step
that needs its tokens or reuses its slots. So any order of plans is correct; plans that leave the requests of the last few
steps alone are fast, as the scheduler's are.
"""

import socket
from collections import deque
from collections.abc import Mapping

import numpy as np

from quire.cache.layout import stage_layout
from quire.config.config import Config
from quire.device.base import Device
from quire.dist.channel import Shape
from quire.dist.mesh import share_layers
from quire.dist.shared_memory import PeerWatch
from quire.dist.stages import PipelineRank, Ring, join_ring
from quire.engine.executor import wire
from quire.engine.executor.local import DividedExecutor
from quire.engine.executor.workers import Workers
from quire.engine.runners import bounded_facts, make_device_drafter, make_parts, runner_settings
from quire.runner.flight import StepFlight
from quire.runner.settings import DTYPES
from quire.runner.stage import BegunStep, StageRunner
from quire.types.plan import Ints, StepPlan, StepResult, Words

NOTHING: Ints = np.empty(0, np.int32)


class StageFlight:
    def __init__(self, executor: "StagesExecutor", begun: BegunStep) -> None:
        self._executor, self.begun = executor, begun
        self.flight: StepFlight | None = None  # when it is finished
        plan = begun.plan
        self._slots, self._samples = {*plan.slot.tolist()}, {*plan.slot[plan.sample].tolist()}

    def comes_before(self, plan: StepPlan) -> bool:
        """Return whether it must be finished before the plan begins."""
        taken = {*plan.retired.tolist(), *plan.given_slot.tolist(), *(admission.slot for admission in plan.admitted)}
        return not self._slots.isdisjoint(taken) or not self._samples.isdisjoint(plan.slot.tolist())

    def sample(self, masks: Words) -> None:
        self._executor.finish(self).sample(masks)
        self._executor.note_sampled(self)

    def result(self) -> StepResult:
        found = self._executor.finish(self).result()
        self._executor.refuse_freed()
        return found


class StagesExecutor(DividedExecutor):
    """Pipeline parallelism. A step that fails on one rank ends all of them."""

    def __init__(self, runner: StageRunner, workers: Workers, ring: Ring) -> None:
        super().__init__(runner, workers)
        self._stage = runner
        self._mates = [rank for rank in ring.own.stage_ranks if rank != ring.own.rank]
        self._open: deque[StageFlight] = deque()  # begun, not finished
        self._sampled: dict[int, Ints] = {}  # step -> sampled tokens that the other ranks of this stage do not have yet

    def submit(self, plan: StepPlan) -> StageFlight:
        self.check()
        for flight in [each for each in self._open if each.comes_before(plan)][-1:]:
            self.finish(flight)
        plan = self._stage.complete(plan)
        sampled, self._sampled = self._sampled, {}
        self._workers.send(wire.BeginStep(sampled, plan))
        with self._in_step(plan):
            flight = StageFlight(self, self._stage.begin(plan))
        self._open.append(flight)
        return flight

    def finish(self, flight_to_finish: StageFlight) -> StepFlight:
        """Finish a step and all that were begun before it."""
        while flight_to_finish.flight is None:
            flight = self._open.popleft()
            plan = flight.begun.plan
            with self._in_step(plan):
                if self._mates:
                    self._workers.send(wire.FinishStep(plan.step), self._mates)
                flight.flight = self._stage.finish(flight.begun)
            flight.flight.before_following, flight.flight.meanwhile = self._follow, self._meanwhile
            self.note_sampled(flight)
        return flight_to_finish.flight

    def _follow(self, lengths: Ints) -> None:
        """Let all ranks of this stage draft at the same time; steps then run one at a time."""
        if self._mates:
            sampled, self._sampled = self._sampled, {}
            self._workers.send(wire.Follow(next(iter(sampled.values()), NOTHING), lengths), self._mates)

    def note_sampled(self, flight: StageFlight) -> None:
        shared = self._mates and not self._stage.samples_itself(flight.begun.plan)
        ids = flight.flight.sampled_ids() if shared and flight.flight is not None else None
        if ids is not None:
            self._sampled[flight.begun.plan.step] = ids


def join_pipeline(
    config: Config,
    device: Device,
    rank: int,
    memory: int,
    peers: Mapping[int, socket.socket],
    watch: PeerWatch,
    remote: Mapping[int, socket.socket],
) -> Ring:
    """Connect to the other ranks. memory, peers, remote: shared memory, and sockets of this node and of others."""
    own = PipelineRank.of(rank, config.stage_layers, config.ranks, config.args.enable_expert_parallel)
    slots = config.depth + 2  # of the channel: steps in flight, and one more
    shape = Shape(slots, config.max_batched_tokens, config.facts.hidden_size, DTYPES[config.dtype])
    return join_ring(device, own, shape, memory, peers, watch, remote)


def make_stage_runner(config: Config, device: Device, ring: Ring) -> StageRunner:
    """Return the runner of a stage. Drafters run where tokens are sampled: whole on each rank of the first stage."""
    drafts = config.drafts_on_device and ring.own.stage.first
    drafter = make_device_drafter(config) if drafts else None
    whole = config.draft_head is not None and bool(config.draft_head.facts.layers)
    facts, own, position = bounded_facts(config), config.stage_attentions[ring.own.stage.index], ring.own.position
    layers, parts = share_layers(facts.layers, position), make_parts(config, device, position, ring.group, drafter=drafter)
    return StageRunner(
        facts,
        runner_settings(config, enforce_eager=drafts or whole),
        stage_layout(layers, own, config.page_size, config.cache_bytes),
        device=device,
        ring=ring,
        layers=[layers[index] for index in own],
        whole=whole,
        parts=parts,
    )
