"""Step times of a model that is divided among GPUs: each stage's work (`analytic.py`) and its collectives (`links.py`).

    a stage    sums of [tokens, hidden] after attention and after the MLP of each layer; the first stage also sums embeddings
               and gathers the logits [samples, vocabulary] in float32
    experts    within an engine, the same sums; over several engines, all-to-all, all-to-all and all-gather instead of a sum
    stages     send [tokens, hidden] to the next one, the last one to the first

A step occupies the slowest stage for `seconds`; its result is there after `latency`, when it has passed all stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from quire.config.args import split_layers
from quire.config.config import Config
from quire.config.memory import ParameterParts, count_sums, parameter_parts
from quire.dist.mesh import largest_share
from quire.sim.analytic import AnalyticTiming, GPUModel, HostTime, StepShape
from quire.sim.links import HOST_SUM_S, Fabric
from quire.types.cache import DTYPE_BYTES, LayerCache

LOGIT_BYTES = 4


@dataclass(frozen=True)
class Layout:
    """How a model is divided among GPUs."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def ranks(self) -> int:
        """Return the GPUs of an engine."""
        return self.tensor * self.pipeline

    @property
    def cards(self) -> int:
        return self.ranks * self.data

    @property
    def flags(self) -> str:
        """Return the arguments of `quire serve`."""
        sizes = (("-tp", self.tensor), ("-pp", self.pipeline), ("-dp", self.data))
        flags = [f"{flag} {size}" for flag, size in sizes if size > 1]
        return " ".join([*flags, *(["-ep"] if self.expert else [])]) or "-tp 1"


@dataclass(frozen=True)
class ModelSizes:
    """What determines the time of a model's steps."""

    parts: ParameterParts
    layers: Sequence[LayerCache]
    hidden: int
    vocabulary: int
    weight_bytes: float  # of a parameter in memory
    cache_bytes: int  # of a value in the KV cache
    element_bytes: int  # of a value of hidden states
    sums: int  # of all layers (`count_sums`)
    sparse: int  # of these, after experts

    @classmethod
    def of(cls, config: Config, weights: int) -> "ModelSizes":
        """weights: bytes of all weights in memory"""
        facts = config.facts
        return cls(
            parameter_parts(facts.hf),
            facts.layers,
            facts.hidden_size,
            facts.vocab_size,
            weights / facts.parameters,
            config.cache_bytes,
            DTYPE_BYTES[config.dtype],
            *count_sums(facts.hf),
        )


@dataclass(frozen=True)
class _Stage:
    timing: AnalyticTiming
    sums: float
    shared: float  # layers whose experts are shared with other engines
    first: bool


class ParallelTiming:
    """Step times of one engine, by the ranks with most work."""

    def __init__(self, card: GPUModel, fabric: Fabric, layout: Layout, model: ModelSizes, partition: str | None = None) -> None:
        """partition: layers of each stage; None: as even as possible"""
        self.host = HostTime()
        self._fabric, self._layout, self._model = fabric, layout, model
        self._group = fabric.span(layout.tensor)
        self._experts = fabric.span(layout.tensor * layout.data)
        self._crosses = layout.pipeline > 1 and layout.ranks > fabric.cards
        shared = largest_share(model.layers, layout.tensor)
        stages = split_layers(len(shared), layout.pipeline, partition)
        self._stages = [self._stage(card, shared, own, number) for number, own in enumerate(stages)]

    def seconds(self, shape: StepShape) -> float:
        """Return how long a step of this shape occupies the slowest stage."""
        return max(self._stage_seconds(stage, shape) for stage in self._stages)

    def latency(self, shape: StepShape) -> float:
        """Return the time from the start of a step to its tokens."""
        return sum(self._stage_seconds(stage, shape) for stage in self._stages)

    def exchange_seconds(self, shape: StepShape) -> float:
        """Return the part of `latency` that is spent in collectives and between stages."""
        return sum(self._exchange(stage, shape) for stage in self._stages)

    def host_seconds(self) -> float:
        """Return the time of a step's sums if each goes through the hosts."""
        return HOST_SUM_S * sum(stage.sums for stage in self._stages) if self._layout.tensor > 1 else 0.0

    def _stage(self, card: GPUModel, shared: Sequence[LayerCache], own: range, number: int) -> _Stage:
        model, layout, first = self._model, self._layout, number == 0
        share, engines = len(own) / max(1, len(shared)), layout.data if self._shares_experts else 1
        parts = replace(
            model.parts,
            dense=ceil(model.parts.dense * share / layout.tensor),
            expert=ceil(model.parts.expert * share / (layout.tensor * engines)),
            head=ceil(model.parts.head / layout.tensor) if first else 0,
            embedding=0,
            query_width=ceil(model.parts.query_width / layout.tensor),
        )
        kv_bytes = sum(shared[index].bytes_per_token(model.cache_bytes) for index in own)
        timing = AnalyticTiming(
            card, parts, layers=len(own), weight_bytes=model.weight_bytes, kv_bytes=kv_bytes, engines=engines
        )
        shared_layers = model.sparse * share if engines > 1 else 0.0
        return _Stage(timing, model.sums * share + first - shared_layers, shared_layers, first)

    @property
    def _shares_experts(self) -> bool:
        """Whether engines share the experts."""
        return self._layout.expert and self._layout.data > 1 and bool(self._model.parts.experts)

    def _stage_seconds(self, stage: _Stage, shape: StepShape) -> float:
        return stage.timing.seconds(shape) + self._exchange(stage, shape)

    def _exchange(self, stage: _Stage, shape: StepShape) -> float:
        model, fabric = self._model, self._fabric
        states = shape.tokens * model.hidden * model.element_bytes
        seconds = stage.sums * fabric.all_reduce(states, self._group)
        if stage.first:
            seconds += fabric.all_gather(shape.samples * model.vocabulary * LOGIT_BYTES, self._group)
        if stage.shared:
            sent = states / self._layout.tensor * model.parts.experts_per_token
            moved = 2 * fabric.all_to_all(sent, self._experts) + fabric.all_gather(states, self._group)
            seconds += stage.shared * moved
        if self._layout.pipeline > 1:
            seconds += fabric.send(states, self._crosses)
        return seconds
