"""The life of a runner: its model, KV cache, slots and CUDA graphs, from `load` to `close`. `step.py` runs steps on them."""

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.base import Device, Recorder, Setting
from quire.dist.collectives import RankGroup
from quire.dist.measure import Measured, measure
from quire.dist.mesh import ALONE, Position, share_layers
from quire.features.base import Allocation, StepPart
from quire.models.decoder import Decoder
from quire.ops.order import use_order
from quire.runner.buckets import MAX_GRAPH_TOKENS
from quire.runner.flight import StepFlight
from quire.runner.graphs import Graphs, StageBuffers, allowance, fixed_plans
from quire.runner.sampler.pipeline import Sampler
from quire.runner.settings import DTYPES, RunnerSettings, describe_model
from quire.runner.slots import Slots
from quire.runner.transfer import upload_together
from quire.runner.warmup import LONG, largest_step, warm_up_parts, warm_up_products, warm_up_steps, without_ranks
from quire.types.cache import CacheLayout, KVLayout, LayerCache, can_divide
from quire.types.errors import ConfigError, EngineError
from quire.types.plan import Ints, StepPlan
from quire.types.stats import DeviceCounts

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

PartType = TypeVar("PartType", bound=StepPart)


class KVBuffers:
    """The memory of the KV cache: raw pages, and a typed view for each attention layer. `KVLayout` shows the layouts.

    Each buffer has page 0, the null page that no live token uses, and then `pages` usable pages. With `records` the buffers are
    parts of one memory, in which a page is contiguous:  [ page 0: buffer 0, buffer 1 ... | page 1: buffer 0, buffer 1 ... ]
    """

    def __init__(
        self,
        layout: CacheLayout,
        layers: Sequence[LayerCache],
        pages: int,
        dtype: torch.dtype,
        allocate: Callable[[int, int], Tensor],
        kv_layout: KVLayout = KVLayout.PAGES,
        records: bool = False,
    ) -> None:
        """allocate: pages, and bytes of each -> raw memory [pages, bytes] uint8, all zero. records: a page is contiguous if the
        layout has whole pages.
        """
        self._layout = layout
        self._layers = layers
        self._dtype = dtype
        self._lines = 1  # equal parts of a buffer, each divided into pages
        divided = kv_layout is not KVLayout.PAGES and can_divide(layout, layers, dtype.itemsize)
        if divided:
            sides = layers[0].sides
            self._lines = sides if kv_layout is KVLayout.SPLIT else sides * layers[0].kv_heads
        self._records: Tensor | None = None  # [pages + 1, bytes of a page in all buffers]
        if records and not divided and layout.buffers:
            self._records = allocate(pages + 1, layout.page_bytes * layout.buffers)
            self.raw = list(torch.split(self._records, layout.page_bytes, 1))  # each [pages + 1, page_bytes]
        else:
            self.raw = [allocate(pages + 1, layout.page_bytes) for _ in range(layout.buffers)]

    def views(self) -> list[tuple[int, Tensor, int]]:
        """Return (layer, its cache [pages + 1, sides, kv_heads, page_size, head_dim], its group) per layer of the layout."""
        return [
            (layer, self._view(self.raw[buffer], self._layers[layer]), index)
            for index, group in enumerate(self._layout.groups)
            for buffer, layer in enumerate(group.layers)
        ]

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy whole pages, in every buffer."""
        if not len(source) or not self.raw:
            return
        read, write = upload_together([source, target], self.raw[0].device)
        for buffer in self.raw:
            lines = self._parts(buffer)
            lines[:, write] = lines[:, read]

    @property
    def page_bytes(self) -> int:
        return self._layout.page_bytes * len(self.raw)

    def gather(self, pages: Ints, out: Tensor) -> None:
        """Copy these pages to out [pages, page_bytes] uint8."""
        (index,) = upload_together([pages], self.raw[0].device)
        if self._records is not None:
            records, out = _in_words(self._records, out)
            torch.index_select(records, 0, index, out=out)
            return
        for buffer, part in zip(self.raw, torch.split(out, self._layout.page_bytes, 1), strict=True):
            part.view(len(part), self._lines, -1).copy_(self._parts(buffer)[:, index].transpose(0, 1))

    def scatter(self, pages: Ints, content: Tensor) -> None:
        """Overwrite these pages. content: [pages, page_bytes] uint8"""
        (index,) = upload_together([pages], self.raw[0].device)
        if self._records is not None:
            records, content = _in_words(self._records, content)
            records[index] = content
            return
        for buffer, part in zip(self.raw, torch.split(content, self._layout.page_bytes, 1), strict=True):
            self._parts(buffer)[:, index] = part.reshape(len(part), self._lines, -1).transpose(0, 1)

    def _parts(self, buffer: Tensor) -> Tensor:
        """Return the buffer as [parts, pages, bytes]."""
        return buffer.view(self._lines, len(buffer), -1)

    def _view(self, raw: Tensor, layer: LayerCache) -> Tensor:
        """Return the layer's typed view. A layer smaller than a page uses the first part of each page."""
        size, sides, typed = self._layout.page_size, layer.sides, raw.view(self._dtype)
        if self._lines > 1:
            inner = sides * layer.kv_heads // self._lines  # contiguous heads of a page
            parts = typed.view(sides, -1, len(raw), inner, size, layer.head_dim)
            return parts.permute(2, 0, 1, 3, 4, 5).view(len(raw), sides, layer.kv_heads, size, layer.head_dim)
        elements = sides * layer.kv_heads * size * layer.head_dim
        return typed[:, :elements].view(len(raw), sides, layer.kv_heads, size, layer.head_dim)


def _in_words(*arrays: Tensor) -> Sequence[Tensor]:
    """Return rows of bytes as rows of 64-bit words, of which there are fewer to copy, if all of them allow it."""
    sizes = [size for array in arrays for size in (array.shape[1], array.stride(0), array.storage_offset())]
    return arrays if any(size % 8 for size in sizes) else [array.view(torch.int64) for array in arrays]


class SlotState(NamedTuple):
    """The per-slot state of a runner, while its cache is allocated."""

    slots: Slots
    kv: KVBuffers
    sampler: Sampler


class RunnerCore(ABC):
    """The life of a runner: load, profile, allocate, then launch after launch; `close` frees all memory."""

    def __init__(
        self,
        facts: "ModelFacts",
        settings: RunnerSettings,
        layout: CacheLayout,
        *,
        device: Device,
        parts: Sequence[StepPart] = (),
        position: Position = ALONE,
        group: RankGroup | None = None,
    ) -> None:
        """layout: of this rank's share of the cache.
        parts: in the order of FEATURES.
        position: this rank's share of the model. group: the ranks that share it.
        """
        self._facts, self._settings, self._layout, self._device = facts, settings, layout, device
        self._parts, self._position, self._group = tuple(parts), position, group
        self._layers = facts.layers if group is None else share_layers(facts.layers, position)
        self._dtype, self._cache_dtype = DTYPES[settings.dtype], DTYPES[settings.cache_dtype or settings.dtype]
        self._vocabulary = facts.vocab_size + settings.added_tokens
        self._recording = device.records and not settings.enforce_eager and (group is None or group.records)
        self._parameters = 0  # of this rank, quantized ones included
        self._kv_layout = KVLayout.PAGES
        self._model: Decoder | None = None
        self._state: SlotState | None = None
        self.graphs: Graphs | None = None  # it counts captures and replays

    def _use_order(self) -> None:
        """Set this runner's order of sums: another engine of this process may have set its own."""
        use_order(self._settings.fixed_order)

    def load(self) -> None:
        self._use_order()
        model, weights = self._build(), self._settings.weights
        for part in self._parts:
            part.transform(model)
        # loading replaces quantized matrices by their packed form, and a device may keep weights outside the model
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        weights.load(model, self._facts, self._device, self._dtype, self._cache_dtype)
        for part in self._parts:
            part.load(model, self._reserved_bytes)
        facts, tapped = replace(self._facts, layers=tuple(self._layers)), any(part.reads_layers for part in self._parts)
        prepared = self._device.prepare(model, Setting(facts, self._dtype, self._layout, weights.load_format, tapped))
        for part in self._parts:
            part.check_prepared(prepared)
        model.body, self._kv_layout = prepared.body, prepared.kv_layout
        self._model = model

    def _build(self) -> Decoder:
        """Return this rank's share of the model, without weights."""
        return self._settings.weights.build(self._facts, self._device, self._position, self._group)

    def part(self, kind: type[PartType]) -> PartType:
        """Return the part of a feature that is on."""
        found = next((part for part in self._parts if isinstance(part, kind)), None)
        if found is None:
            raise EngineError(f"the engine was started without {kind.name}")
        return found

    def call_part(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of the part of this name, on every rank if the executor calls this."""
        part = next((part for part in self._parts if part.name == name), None)
        if part is None:
            raise EngineError(f"the engine was started without {name}")
        return getattr(part, method)(*args)

    @abstractmethod
    def launch(self, plan: StepPlan) -> StepFlight:
        """Run a step."""

    def warm_up(self) -> None:
        """Run typical steps, so that no request waits for a kernel to compile, on devices that compile kernels."""
        if not self._device.compiles:
            return
        self.allocate(0, self._facts.max_position)
        assert self._state is not None
        (slots, _, sampler), model, longest = self._state, self._loaded(), min(LONG, self._facts.max_position)
        max_seqs, max_tokens = self._settings.max_seqs, self._settings.max_batched_tokens
        with without_ranks(model, self._group):
            warm_up_parts(model, slots, sampler, self._vocabulary, longest, self._enter)
        for plan in warm_up_steps(max_seqs, max_tokens, longest, whole=not model.keeps_context):
            flight = self.launch(structs.replace(plan, guesses=np.full(len(plan.slot), slots.drafts, np.int32)))
            if flight.follows:
                flight.result()
        hidden = torch.zeros(max_tokens, self._facts.hidden_size, dtype=self._dtype, device=slots.device)
        with without_ranks(model, self._group):
            warm_up_products(model, hidden, MAX_GRAPH_TOKENS, self.finishes)
            for part in self._parts:
                part.warm_up(max_tokens)
        del hidden
        self._device.synchronize()
        self._free_slots()

    def _free_slots(self) -> None:
        self._state = self.graphs = None

    def _enter(self, batch: Batch) -> Tensor:
        """Return the input of the first layer [T, H]."""
        return self._loaded().embed(batch)

    @property
    def finishes(self) -> bool:
        """Whether this rank has the LM head and samples."""
        return True

    def profile(self, gpu_memory_utilization: float, kv_cache_memory_bytes: int | None) -> int:
        """Return the bytes for the KV cache: as given, or what a run of the largest step leaves."""
        if not self._loaded().keeps_context:
            self._profile_run()  # it fails now rather than later if memory is short
            return 0
        if kv_cache_memory_bytes is None:
            return self._device.budget(gpu_memory_utilization, self._profile_run, self._reserved_bytes())
        if kv_cache_memory_bytes <= 0:
            raise ConfigError(f"kv_cache_memory_bytes must be positive, got {kv_cache_memory_bytes}")
        return kv_cache_memory_bytes

    def _profile_run(self) -> None:
        """Run the largest step, on a cache of the null page alone."""
        settings = self._settings
        plan = largest_step(settings.max_seqs, settings.max_batched_tokens, self._facts.max_position, settings.num_draft_tokens)
        self.allocate(0, int(plan.end.max()))
        self.launch(plan).result()
        self._free_slots()

    def _reserved_bytes(self) -> int:
        """Return the bytes of device memory that parts and CUDA graphs will take."""
        rows = self._settings.max_seqs * (1 + self._settings.num_draft_tokens)
        graphs = allowance(rows, self._vocabulary, self._parts) if self._recording else 0
        return graphs + sum(part.reserved_bytes(self._settings.max_seqs, self._recording) for part in self._parts)

    def allocate(self, pages: int, max_model_len: int, snapshots: int = 0, snapshot_records: int = 1) -> None:
        """Allocate `pages` usable pages (the null page comes on top), and slots for contexts of max_model_len.

        pages: 0: a profile or warm-up run, whose results do not matter.
        snapshots: entries for saved recurrent states. snapshot_records: that each takes in the host tier.
        """
        self._use_order()
        model, settings, device = self._loaded(), self._settings, self._device.torch_device
        records = any(part.moves_pages for part in self._parts)
        kv = KVBuffers(self._layout, self._layers, pages, self._cache_dtype, self._device.allocate, self._kv_layout, records)
        for layer, view, group in kv.views():
            model.attentions[layer].bind(view, group, dtype=self._dtype)
        groups, page_size, drafts = max(1, len(self._layout.groups)), self._layout.page_size, settings.num_draft_tokens
        slots = Slots(settings.max_seqs, max_model_len, groups, page_size, device, drafts, self._device.updates())
        sampler = Sampler(
            settings.max_seqs, self._vocabulary, device, settings.logprobs_mode, drafts, own=self._facts.vocab_size
        )
        self._state = SlotState(slots, kv, sampler)
        recorder = self._device.recorder if self._recording else None
        allocation = Allocation(
            pages, snapshots, slots, sampler, recorder, kv, share=self.share, snapshot_records=snapshot_records
        )
        for part in sorted(self._parts, key=lambda part: part.moves_pages):  # what moves pages has to know all of them
            part.allocate(allocation)
        planners = fixed_plans(model, len(self._layout.groups)) if self._recording else None
        self.graphs = None
        if planners is not None:
            self.graphs = Graphs(
                model, slots, sampler, planners, self._device.recorder(), self._vocabulary, settings.max_batched_tokens, drafts,
                self._parts, self._stage_buffers(), None if self._group is None else self._group.largest,
            )  # fmt: skip
            if pages and drafts:
                with torch.inference_mode():
                    self.graphs.record_drafts()

    def _stage_buffers(self) -> StageBuffers | None:
        """Return where recorded steps of a pipeline stage, or of a model that pools, read and write hidden states."""
        if not any(part.replays_states for part in self._parts):
            return None
        return StageBuffers.to_pool(self._facts.hidden_size, self._dtype, self._device.torch_device)

    def _loaded(self) -> Decoder:
        if self._model is None:
            raise EngineError("the runner has no model: load() has not been called, or close() has")
        return self._model

    def synchronize(self) -> None:
        """Wait until every launched step has run."""
        self._device.synchronize()

    def close(self) -> None:
        """Free all memory on the device. The other ranks must have ended."""
        for part in self._parts:
            part.close()
        self._free_slots()
        if self._group is not None:
            gc.collect()  # NCCL waits for CUDA graphs that contain its collectives
            self._group.close()
        self._model = self._group = None
        self._parts = ()
        gc.collect()
        self._device.close()

    @property
    def counts(self) -> DeviceCounts:
        graphs, counts = self.graphs, self._device.counts()
        captures, replays, eager = (graphs.captures, graphs.replays, graphs.eager) if graphs is not None else (0, 0, 0)
        return DeviceCounts(counts.compilations, counts.loads, captures, replays, eager)

    @property
    def share(self) -> str:
        """Return a name of this rank's share of the model."""
        return f"{self._position.rank} of {self._position.size}"

    def describe_rank(self) -> dict[str, int]:
        """Return what this process has of the model."""
        own = {"rank": self._position.rank, "ranks": self._position.size, "pid": os.getpid()}
        own |= {"threads": torch.get_num_threads(), "parameters": self._parameters, **describe_model(self._loaded())}
        for part in self._parts:
            own |= part.describe()
        return own

    @torch.inference_mode()
    def measure_collectives(self, sizes: Sequence[int]) -> list[Measured]:
        """Measure the collectives of this rank's group, while all ranks do; nothing without a group. sizes: in bytes."""
        if self._group is None:
            return []
        records = self._device.records and self._group.records
        record = partial(self._record, self._device.recorder()) if records else None
        return measure(self._group, self._position, self._device.torch_device, self.synchronize, sizes, record)

    def _record(self, recorder: Recorder, launch: Callable[[], None]) -> Callable[[], Tensor]:
        """Record what `launch` launches. Return what replays it."""
        nothing = torch.zeros(1, device=self._device.torch_device)

        def run() -> Tensor:
            launch()
            return nothing

        return recorder.capture(run).replay

    @property
    def records_with_ranks(self) -> bool:
        """Whether CUDA graphs contain collectives, so that all ranks must record the same ones at the same time."""
        return self._recording and self._group is not None

    @property
    def waits_on_device(self) -> bool:
        """Whether the device, not the host, waits for other ranks."""
        return self._group is not None and self._device.torch_device.type != "cpu"

    def late_ranks(self) -> list[int]:
        """Return the ranks of its group that this rank's device waits for, as far as that is known."""
        return [] if self._group is None else self._group.late()

    def abandon(self) -> bool:
        """End launched work that waits for lost ranks. Return whether all of it has ended."""
        if self._device.torch_device.type == "cpu":
            return True
        return self._group is not None and self._group.abandon()

    def check(self) -> None:
        """Raise EngineDead if other engines that this one needs are lost."""
        for part in self._parts:
            part.check()

    def check_health(self) -> None:  # noqa: B027
        """Answer: the process is alive."""

    @torch.inference_mode()
    def idle(self) -> bool:
        """Record one CUDA graph in idle time. Return False if nothing is left to prepare."""
        self._use_order()
        return (self.graphs is not None and self.graphs.record_next()) or any(part.idle() for part in self._parts)
