"""The runner: holds a model, its cache and its slots, and turns step plans into flights.

It does what the plan says, in the plan's order, and decides nothing. It does not know requests, only slots.
"""

import gc
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.base import Device, Setting
from quire.dist.collectives import Group
from quire.dist.experts import SharedExperts
from quire.dist.mesh import ALONE, Position, share_layers
from quire.features.base import Allocation, StepPart
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.models.registry import build_model
from quire.prepare.quantize import find_grain
from quire.prepare.shard import find_experts, shard, share_experts
from quire.runner.balance import Balancer, serve_experts
from quire.runner.batch import Built, build_batch, compute_logits
from quire.runner.buckets import MOST_ROWS, MOST_TOKENS
from quire.runner.copies import Needs, copy_matrices
from quire.runner.draft.base import DeviceDrafter, Drafter, Guessing
from quire.runner.draft.taps import KeptStates, Taps
from quire.runner.draft.unroll import unroll
from quire.runner.draft.verify import Verification, prepare
from quire.runner.flight import StepFlight
from quire.runner.graph_capture import Passage
from quire.runner.graphs import Graphs, Undrawn, allowance, fixed_plans
from quire.runner.kv import KVBuffers
from quire.runner.profile_run import largest_step
from quire.runner.prompt_logprobs import final_states, report_prompts
from quire.runner.rollback import Rollback
from quire.runner.sampler.grammar import Masks
from quire.runner.sampler.logprobs import Report
from quire.runner.sampler.pipeline import Drawn, Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.states import StateBuffers
from quire.runner.transfer import Longs, upload
from quire.runner.warmup import LONG, apart, warm_up_parts, warm_up_products, warm_up_steps
from quire.types.cache import CacheLayout, KVLayout
from quire.types.errors import ConfigError, EngineError
from quire.types.plan import Ints, StepPlan, StepRows
from quire.types.sampling import LogprobsMode
from quire.types.stats import DeviceCounts

if TYPE_CHECKING:
    from quire.config.eplb import EplbConfig
    from quire.config.facts import ModelFacts
    from quire.config.quantization import Quantization

DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
Wanted = tuple[list[tuple[int, Report]], Callable[[Masks | None], Drawn] | None, Tensor | None]  # of a step: see `StepFlight`


Part = TypeVar("Part", bound=StepPart)


class Runner:
    """Life: load, profile, allocate, then launch after launch; `close` gives all memory back.

    A launch that raises has taken the plan's retirements, admissions and table entries into account, but has run no row: the
    slots stand where they stood, and the next plan may be launched.
    """

    def __init__(
        self,
        facts: "ModelFacts",
        *,
        device: Device,
        dtype: str,
        layout: CacheLayout,
        max_seqs: int,
        max_batched_tokens: int,
        load_format: str = "auto",
        seed: int = 0,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        model_impl: str = "auto",
        enforce_eager: bool = False,
        keep_quantized: bool = False,
        quantization: "Quantization | None" = None,
        keeps: frozenset[str] = frozenset(),
        drafter: Drafter | DeviceDrafter | None = None,
        drafts: int = 0,
        parts: Sequence[StepPart] = (),
        more_tokens: int = 0,
        position: Position = ALONE,
        group: Group | None = None,
        cache_dtype: str | None = None,
        eplb: "EplbConfig | None" = None,
        exchange: SharedExperts | None = None,
    ) -> None:
        """drafts: draft tokens per row in the plan; ignored if a drafter runs on the device.
        parts: of features, in the order of FEATURES.
        more_tokens: vocabulary entries that adapters may add to the model's own.
        position: this rank's share of the model; `layout` is that of its share of the cache, and the ranks meet in `group`.
        cache_dtype: of the KV cache, if it is not the model's.
        eplb: experts are balanced over the ranks. exchange: experts are shared with other engines.
        """
        self._facts = facts
        self._position, self._group, self._exchange = position, group, exchange
        self._layers = facts.layers if group is None else share_layers(facts.layers, position)
        self._eplb, self._balancer = eplb, cast(Balancer | None, None)
        self._parameters = 0  # of this rank, quantized ones included
        self._untold: Rows | None = None  # of the latest step, where another rank draws
        self._vocabulary = facts.vocab_size + more_tokens
        self._parts = tuple(parts)
        self._drafts = drafts if drafter is None else drafter.most
        self._companion = drafter if isinstance(drafter, DeviceDrafter) else None
        self._drafter = None if isinstance(drafter, DeviceDrafter) else drafter
        self._device = device
        self._dtype, self._cache_dtype = DTYPES[dtype], DTYPES[cache_dtype or dtype]
        self._layout = layout
        self._max_seqs = max_seqs
        self._max_batched_tokens = max_batched_tokens
        self._load_format = load_format
        self._seed = seed
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._model_impl = model_impl
        self._keep_quantized = keep_quantized
        self._quantization, self._keeps = quantization, keeps
        # no graph compares drafts, and none can wait for other ranks
        self._recording = device.records and not enforce_eager and self._drafter is None and group is None
        self.graphs: Graphs | None = None  # it counts what it recorded and replayed
        self._kv_layout = KVLayout.PAGES
        self._states: StateBuffers | None = None
        self._rollback: Rollback | None = None  # of states, where drafts may be wrong
        self._model: Decoder | None = None
        self._tenants: tuple[Slots, KVBuffers, Sampler] | None = None
        self._taps: Taps | None = None
        self._kept_states: KeptStates | None = None  # of replayed steps, where a drafter reads them
        self._launched: StepPlan | None = None  # the latest step
        self._guessing: Guessing | None = None  # of the latest step, where a drafter follows it

    @property
    def counts(self) -> DeviceCounts:
        graphs, counts = self.graphs, self._device.counts()
        return DeviceCounts(
            compilations=counts.compilations,
            loads=counts.loads,
            captures=0 if graphs is None else graphs.captures,
            replays=0 if graphs is None else graphs.replays,
            misses=0 if graphs is None else graphs.eager,
        )

    def load(self) -> None:
        model = self._build()
        # loading replaces quantized matrices by their packed form, and a device may keep weights outside the model
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        for part in self._parts:
            part.transform(model)
        load_weights(
            model, self._facts, device=self._device.torch_device, dtype=self._dtype, load_format=self._load_format,
            seed=self._seed, keep_quantized=self._keep_quantized, quantization=self._quantization, keeps=self._keeps,
            cache_scales=self._cache_dtype.itemsize == 1,
        )  # fmt: skip
        if self._eplb is not None and self._group is not None and self._exchange is None:
            self._balancer = Balancer(model, self._position, self._group, self._eplb)
        for part in self._parts:
            part.load(model, self._reserved_bytes)
        facts = replace(self._facts, layers=tuple(self._layers))
        tapped = self._companion is not None and bool(self._companion.taps)
        setting = Setting(facts, self._dtype, self._layout, self._load_format, tapped)
        prepared = self._device.prepare(model, setting)
        model.body, self._kv_layout = prepared.body, prepared.kv_layout
        self._model = model
        if self._companion is not None:
            self._companion.load(self._device, self._dtype, model)
            self._taps = Taps(model, self._companion.taps) if tapped else None
        if self._exchange is not None:
            serve_experts(model, self._exchange, self._eplb)

    def _build(self) -> Decoder:
        """This rank's share of the model, without weights."""
        model = build_model(self._facts, self._model_impl)
        if self._group is not None:
            # products round activations to 8 bits there, which makes much of the last bits of a sum in another order
            exact = self._keep_quantized and self._device.torch_device.type == "cpu"
            shard(model, self._position, self._group, find_grain(self._quantization), exact=exact)
        if self._exchange is not None:
            share_experts(model, self._exchange)
        return model

    def part(self, kind: type[Part]) -> Part:
        found = next((part for part in self._parts if isinstance(part, kind)), None)
        if found is None:
            raise EngineError(f"the runner has no part {kind.name}")
        return found

    def copy_matrices(self, gpu_memory_utilization: float, cache: int, step: int, asked: bool | None) -> None:
        """Copies of quantized matrices in the model's type, if there is room for all of them (`runner/copies.py`)."""
        needs = Needs(gpu_memory_utilization, cache, step + self._reserved_bytes(), asked)
        copy_matrices(self._loaded(), self._dtype, self._device, needs)

    def warm_up(self) -> None:
        """Runs the steps that traffic is made of, so that no request has to wait for a kernel, where kernels are compiled."""
        if not self._device.compiles:
            return
        self.allocate(0, self._facts.max_position)
        assert self._tenants is not None
        longest = min(LONG, self._facts.max_position)
        slots, _, sampler = self._tenants
        with apart(self._loaded(), self._group):
            warm_up_parts(self._loaded(), slots, sampler, self._vocabulary, longest, self._enter)
        for plan in warm_up_steps(self._max_seqs, self._max_batched_tokens, longest):
            flight = self.launch(structs.replace(plan, guesses=np.full(len(plan.slot), self._drafts, np.int32)))
            if self._companion is not None:
                flight.result()
        hidden = torch.zeros(self._max_batched_tokens, self._facts.hidden_size, dtype=self._dtype, device=slots.device)
        with apart(self._loaded(), self._group):
            warm_up_products(self._loaded(), hidden, MOST_TOKENS, self.finishes)
            for part in self._parts:
                part.warm_up(self._max_batched_tokens)
        del hidden
        self._device.synchronize()
        self._tenants = self.graphs = self._guessing = None

    def _enter(self, batch: Batch) -> Tensor:
        """What layers begin with [T, H]."""
        return self._loaded().embed(batch)

    @property
    def finishes(self) -> bool:
        """Has it the head?"""
        return True

    def profile(self, gpu_memory_utilization: float, kv_cache_memory_bytes: int | None) -> int:
        """Bytes for the cache: as told, or what a run of the largest step leaves."""
        if kv_cache_memory_bytes is not None:
            if kv_cache_memory_bytes <= 0:
                raise ConfigError(f"kv_cache_memory_bytes must be positive, got {kv_cache_memory_bytes}")
            return kv_cache_memory_bytes
        return self._device.budget(gpu_memory_utilization, self._profile_run, self._reserved_bytes())

    def _reserved_bytes(self) -> int:
        """Return the bytes on the device that parts and CUDA graphs will take."""
        rows = self._max_seqs * (1 + self._drafts)
        graphs = allowance(rows, self._vocabulary, self._parts) if self._recording else 0
        if self._recording and self._companion is not None:
            graphs += self._companion.recorded_bytes(self._max_seqs)
        return graphs + sum(part.reserved_bytes(self._max_seqs, self._recording) for part in self._parts)

    def allocate(self, pages: int, max_model_len: int, snapshots: int = 0) -> None:
        """The cache of `pages` usable pages (the null page comes on top), and slots for contexts of max_model_len. Without
        pages nothing that is computed matters. `snapshots`: of recurrent states, where there are any."""
        model = self._loaded()
        device = self._device.torch_device
        kv = KVBuffers(self._layout, self._layers, pages, self._cache_dtype, self._device.allocate, self._kv_layout)
        for layer, view, group in kv.views():
            model.attentions[layer].bind(view, group, dtype=self._dtype)
        self._states = self._rollback = None
        if model.recurrents:
            seats = self._max_seqs if pages else 0
            twice = self._drafts > 0
            self._states = StateBuffers(model.recurrents, seats, snapshots, self._dtype, self._device.allocate, twice)
            self._rollback = Rollback(seats, self._states) if twice and seats else None
        groups, page_size = max(1, len(self._layout.groups)), self._layout.page_size  # whoever fills rows counts on one
        told = self._drafter is None and self._drafts > 0
        slots = Slots(self._max_seqs, max_model_len, groups, page_size, device, self._drafts, self._device.updates(), told)
        sampler = Sampler(
            self._max_seqs, self._vocabulary, device, self._logprobs_mode, self._drafts, own=self._facts.vocab_size
        )
        self._tenants = slots, kv, sampler
        if self._companion is not None:
            own = self._device.recorder() if self._recording and pages else None
            self._companion.allocate(pages, slots, sampler, self._max_batched_tokens, own)
        recorder = self._device.recorder if self._recording else None
        for part in self._parts:
            part.allocate(Allocation(pages, snapshots, slots, sampler, recorder))
        planners = fixed_plans(model, len(self._layout.groups)) if self._recording else None
        self.graphs = None
        if self._balancer is not None:
            self._balancer.forget()  # steps that nobody asked for
        if planners is not None:
            most, self._kept_states = self._max_batched_tokens, None
            if self._companion is not None and self._companion.reads:
                count, size, most = len(self._companion.taps) or 1, self._facts.hidden_size, 0  # rows of one token only
                self._kept_states = KeptStates(self._taps, count, MOST_ROWS, size, self._dtype, device)
            self.graphs = Graphs(
                model, slots, sampler, planners, self._device.recorder(), self._vocabulary, most, self._drafts, self._parts,
                self._kept_states, self._passage(),
            )  # fmt: skip
            if pages and told:
                with torch.inference_mode():
                    self.graphs.record_drafts()

    def _passage(self) -> Passage | None:
        """Of a stage."""
        return None

    def synchronize(self) -> None:
        """Wait until every launched step has run."""
        self._device.synchronize()

    def close(self) -> None:
        """Give back all memory on the device. The other ranks must have ended."""
        for joint in (*self._parts, self._exchange, self._group, self._companion):
            if joint is not None:
                joint.close()
        self._model = self._tenants = self.graphs = self._group = self._states = self._balancer = None
        self._guessing = self._untold = self._rollback = self._taps = self._kept_states = self._launched = None
        self._exchange = self._companion = self._drafter = None
        self._parts = ()
        gc.collect()
        self._device.close()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepFlight:
        slots, sampler = self._take_in(plan)
        if not len(plan.slot):
            return StepFlight(plan, [], None)
        plain = not len(plan.masked) and sampler.plain(plan.slot)
        run, owner = self._rows_of(plan)
        if self._rollback is not None:
            run = self._go_back(self._rollback, plan, slots)
        more = wants_more(run) or (self._kept_states is not None and run.tokens > len(run.slot))
        replayed = None if self.graphs is None or more else self._replay(self.graphs, run, plain)
        prompts: list[tuple[int, Report]] = []
        pooled: Tensor | None = None
        draw: Drawn | Callable[[Masks | None], Drawn] | None = None
        if replayed is None:
            whole = self._companion is not None and self._companion.whole
            built = build_batch(run, slots, self._parts, whole=whole, states=self._states)
            prompts, draw, pooled = self._take_out(run, built, self._loaded()(built.batch))
            if owner is not None:
                prompts = [(int(owner[row]), report) for row, report in prompts]
        else:
            draw = self._take_replayed(run, replayed)
        slots.advance(plan)
        if self._states is not None:
            self._states.copy(plan.save_slot, plan.save_entry)
        self._launched = plan
        if self.draws_itself(plan):
            self._untold = None
        return StepFlight(plan, prompts, draw, pooled, self._guessing)

    def _rows_of(self, plan: StepPlan) -> tuple[StepRows, Longs | None]:
        """Those that are run, and which of the plan's each is of, where they are not the same."""
        told = self._drafter is None and plan.shapes.drafted > 0
        return unroll(plan) if told and self._device.records else (plan, None)

    def _take_in(self, plan: StepPlan) -> tuple[Slots, Sampler]:
        """Everything of a plan but its rows."""
        self._loaded()
        if self._tenants is None:
            raise EngineError("a step was launched before the cache was allocated")
        slots, kv, sampler = self._tenants
        slots.updates.deliver()  # what a launch that failed left
        slots.take_in(plan)
        if plan.admitted or len(plan.retired):
            self._admit(plan, sampler)
        sampler.refresh(slots.updates)
        if len(plan.copy_from):
            kv.copy(plan.copy_from, plan.copy_to)
        if self._companion is not None:
            self._companion.take_in(plan)
        if self._states is not None:
            self._states.copy(plan.load_entry, plan.load_slot)
        if self._rollback is not None:
            self._rollback.admit(plan)
        if len(plan.slot):
            if self._balancer is not None:
                self._balancer.before_step()
            slots.check(plan)
            self._device.note(plan.tokens)
        else:
            slots.updates.deliver()
        return slots, sampler

    def _admit(self, plan: StepPlan, sampler: Sampler) -> None:
        for slot in plan.retired.tolist():
            sampler.retire(slot)
            for part in self._parts:
                part.retire(slot)
        for admission in plan.admitted:
            sampler.admit(admission.slot, admission)
            for part in self._parts:
                part.retire(admission.slot)
                part.admit(admission.slot, admission)
        missing = {name for each in plan.admitted for name in each.extras.features} - {part.name for part in self._parts}
        if missing:
            raise EngineError(f"a request uses {', '.join(sorted(missing))}, which this engine was started without")

    def _go_back(self, rollback: Rollback, plan: StepPlan, slots: Slots) -> StepRows:
        """States stand where the rows begin that are to be run, and those returned are to be run in their place."""
        first, run = rollback.prepare(plan)
        if first is not None:
            self._loaded()(build_batch(first, slots, self._parts, states=self._states).batch)
        rollback.keep()
        return run

    def _take_out(self, plan: StepRows, built: Built, hidden: Tensor) -> Wanted:
        """hidden [K, H] of the tokens that the batch keeps."""
        assert self._tenants is not None
        (slots, _, sampler), model, batch = self._tenants, self._loaded(), built.batch
        outputs, pooled = plan.outputs, None
        prompts = report_prompts(plan, built, hidden, model, slots, sampler) if len(outputs.prompt_logprobs) else []
        if len(outputs.pool):
            pooled = hidden[upload(final_states(outputs.pool, plan, built), hidden.device)].float()
        drawn_from = hidden[batch.logit_index] if len(outputs.draw) else hidden[:0]
        follow = None if self._drafter is None else prepare(plan, slots, batch, built.rows, drawn_from)
        draw = self._prepare_draw(drawn_from, built.rows, batch, outputs.draw, follow)
        if self._companion is not None:
            states = self._taps.take() if self._taps is not None else [hidden] if self._companion.whole else []
            self._guessing = Guessing(self._companion, states, drawn_from)
        return prompts, draw, pooled

    def _prepare_draw(
        self, hidden: Tensor, rows: Rows, batch: Batch, tokens: Ints | None, follow: Verification | None = None
    ) -> Callable[[Masks | None], Drawn] | None:
        """hidden [N, H] of the draws, tokens [N] which of the batch's they are. None = nothing is drawn, or another rank
        does."""
        self._untold = None
        if not len(hidden):
            return None
        logits = compute_logits(self._loaded(), hidden, batch, tokens)
        self._untold = None if self._position.rank == 0 else rows
        return partial(self._draw, logits, rows, follow) if self._position.rank == 0 or self._device.draws_alike else None

    def draws_itself(self, plan: StepPlan) -> bool:
        """Does every rank draw in this step? All have the same logits, of the same bits, and whatever else a draw depends on;
        but masks are the first one's alone."""
        return self._device.draws_alike and not len(plan.masked)

    def _replay(self, graphs: Graphs, plan: StepRows, plain: bool) -> Tensor | Undrawn | None:
        keys = self._graph_keys(plan)
        return None if keys is None else graphs.run(plan, plain, keys)

    def _graph_keys(self, rows: StepRows) -> tuple[Hashable, ...] | None:
        """Return the key of each part; None: no graph can run these rows."""
        keys = tuple(part.graph_key(rows) for part in self._parts)
        return None if None in keys else keys

    def _take_replayed(self, plan: StepRows, replayed: Tensor | Undrawn) -> Drawn | Callable[[Masks | None], Drawn] | None:
        if self._companion is not None:
            self._guessing = self._listen(self._companion, plan)
        if isinstance(replayed, Tensor):
            return Drawn(replayed, places=None if plan.shapes.all_draw else plan.draw_row)
        return partial(self._draw, replayed.logits, replayed.rows, None) if len(replayed.rows.slots) else None

    def _listen(self, companion: DeviceDrafter, plan: StepRows) -> Guessing:
        """To what a graph left of a step; where states are read, its rows have one token each."""
        if self._kept_states is None:
            return Guessing(companion, [], None)
        states = self._kept_states.read(len(plan.slot))
        drawing = None if plan.shapes.all_draw else upload(plan.outputs.draw.astype(np.int64), states[0].device)
        return Guessing(companion, states, states[0] if drawing is None else states[0][drawing])

    @torch.inference_mode()
    def _draw(self, logits: Tensor, rows: Rows, follow: Verification | None, masks: Masks | None) -> Drawn:
        """logits [N, V] of the draws. It comes before the next launch."""
        assert self._tenants is not None
        slots, _, sampler = self._tenants
        drawn = sampler.sample(logits, rows, masks)
        return drawn if follow is None or self._drafter is None else follow.follow(drawn, slots, self._drafter)

    @torch.inference_mode()
    def take_drawn(self, ids: Ints) -> None:
        """Of several ranks the first one draws; the others are told what the latest step drew, before the next is launched."""
        rows, self._untold = self._untold, None
        if rows is None and not len(ids):
            return
        if rows is None or len(ids) != len(rows.slots):
            raise EngineError(f"{len(ids)} drawn tokens came for {0 if rows is None else len(rows.slots)} draws")
        rows.tokens[rows.slot, rows.end] = upload(ids, rows.tokens.device)

    def told(self, plan: StepPlan) -> StepPlan:
        """With the drafts that were guessed here."""
        if self._companion is None or not plan.shapes.drafted:
            return plan
        return structs.replace(plan, draft_token=self._companion.guessed(plan))

    def follow(self, lengths: Ints) -> None:
        """Of several ranks the first one draws; the others draft beside it, when they are told what the latest step brought."""
        if self._guessing is not None and self._launched is not None:
            self._guessing.follow(self._launched, lengths)

    def describe_rank(self) -> dict[str, int]:
        """What this process has of the model."""
        model, balancer = self._loaded(), self._balancer
        moved = {} if balancer is None else {"rebalanced": balancer.rebalanced, "moved_experts": balancer.moves}
        return moved | {
            "rank": self._position.rank,
            "ranks": self._position.size,
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "parameters": self._parameters,
            "heads": model.attentions[0].spec.heads if model.attentions else 0,
            "kv_heads": model.attentions[0].spec.kv_heads if model.attentions else 0,
            "experts": max((len(layer.kept) for layer in find_experts(model)), default=0),
        }

    @property
    def waits_for_nobody(self) -> bool:
        """Whatever was launched ends by itself, though other ranks are gone."""
        return self._device.torch_device.type == "cpu"

    def check_companions(self) -> None:
        """Raises EngineDead if engines that share experts with this one are lost."""
        if self._exchange is not None:
            self._exchange.check()

    def check_health(self) -> None:
        """Answers."""

    @torch.inference_mode()
    def idle(self) -> bool:
        """Uses a moment without work to prepare for some: records one CUDA graph. False = there is nothing left to prepare."""
        more = self.graphs is not None and self.graphs.record_next()
        return more or (self._companion is not None and self._companion.idle())

    def _loaded(self) -> Decoder:
        if self._model is None:
            raise EngineError("the runner has no model: load() has not been called, or close() has")
        return self._model

    def _profile_run(self) -> None:
        """The largest step, on a cache of the null page alone; what it computes is meaningless, what it takes is not."""
        plan = largest_step(self._max_seqs, self._max_batched_tokens, self._facts.max_position, self._drafts)
        self.allocate(0, int(plan.end.max()))
        self.launch(plan).result()
        self._tenants = self.graphs = self._guessing = None


def wants_more(rows: StepRows) -> bool:
    """Than draws behind the last tokens, of which graphs are recorded."""
    return bool(rows.shapes.drafted or len(rows.outputs.prompt_logprobs) or len(rows.outputs.pool))
