"""The device half of LoRA: adapters in device memory, and the adapter slot of each request in the batch."""

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from quire.attn.batch import Batch, LoRATokens, Tokens
from quire.device.base import Device
from quire.features.base import Allocation, StepPart
from quire.features.lora.cache import LoRACache, WholeModel
from quire.features.lora.host import reserved_bytes
from quire.features.lora.packing import Adapters, adapt, find_sites
from quire.layers.latent import LatentAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.models.decoder import Decoder
from quire.ops.adapters import sort_rows, tile
from quire.ops.qkv import add_to_near, add_to_values
from quire.runner.graph_inputs import start_size
from quire.runner.slots import Slots
from quire.runner.warmup import THREADS
from quire.types.errors import EngineError
from quire.types.plan import Admission, Ints, Longs, StepRows

WARM_UP_TOKENS = (1, 2, 17, 65, 513)  # token counts with different LoRA kernels
WARM_UP_ROWS = (64, 128, 256, 512, 1024)  # row counts with different sort kernels


class LoRAPart(StepPart):
    name = "lora"
    graph_keys = (False, True)

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        max_loras: int,
        max_rank: int,
        added_tokens: int,
        fixed: str,
        kernels_only: bool,
    ) -> None:
        """added_tokens: vocabulary entries that adapters may add to the model's own.
        fixed, kernels_only: as in `LoRACache`
        """
        self._device, self._dtype, self._max_loras, self._max_rank = device, dtype, max_loras, max_rank
        self._added_tokens, self._fixed, self._kernels_only = added_tokens, fixed, kernels_only
        self._whole: WholeModel | None = None
        self._adapters: Adapters | None = None
        self._model: Decoder | None = None
        self._cache: LoRACache | None = None
        self._adapter_slots: Longs = np.zeros(0, np.int64)  # [S] the adapter slot of each request; 0: none
        self._adapted: set[int] = set()  # slots with an adapter

    @property
    def cache(self) -> LoRACache:
        assert self._cache is not None
        return self._cache

    def before_cut(self, model: Decoder) -> None:
        """Note the whole model: every pipeline stage checks an adapter's file against it."""
        parameters = {name for name, _ in model.named_parameters()}
        self._whole = WholeModel(find_sites(model, self._added_tokens), model.renames, parameters)

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        device = self._device.torch_device
        tabled = (self._max_loras, self._max_rank) if device.type == "cuda" else None  # for kernels
        # once the checkpoint is known: it may store a layer's parts as one tensor or as several
        self._adapters = adapt(model, device=device, dtype=self._dtype, tabled=tabled, more=self._added_tokens)
        budget = None
        if self._device.torch_device.type != "cpu":
            budget = self._max_loras * self._adapters.bytes_of(self._max_rank)
        self._model = model
        self._cache = LoRACache(
            self._adapters, model, self._max_loras, self._max_rank, budget, self._added_tokens, self._whole, self._fixed,
            self._kernels_only,
        )  # fmt: skip

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:  # noqa: ARG002
        adapters = self._adapters
        return 0 if adapters is None else reserved_bytes(self._max_loras, adapters.bytes_of(self._max_rank), adapters.tabled)

    def warm_up(self, max_tokens: int) -> None:
        if self._model is not None and self.cache.has_kernels_for(()):
            warm_up_adapters(self._model, self._device.torch_device, max_tokens)
            self.cache.warm_up()

    def allocate(self, allocation: Allocation) -> None:
        self._adapter_slots = np.zeros(len(allocation.slots.tokens), np.int64)
        self._adapted.clear()

    def admit(self, slot: int, admission: Admission) -> None:
        if admission.extras.adapter_slot:
            self._adapter_slots[slot] = admission.extras.adapter_slot
            self._adapted.add(slot)

    def retire(self, slot: int) -> None:
        self._adapter_slots[slot] = 0
        self._adapted.discard(slot)

    def extend(self, batch: Batch, rows: StepRows, slot: torch.Tensor) -> Batch:  # noqa: ARG002
        if not self._uses(rows.slot):
            return batch
        adapter_slots, by_kernels = self._find(rows.slot)
        each, device = np.repeat(adapter_slots, rows.count), batch.ids.device
        lora = LoRATokens(each, device, tile(each, device) if by_kernels else None)
        return replace(batch, tokens=replace(batch.tokens, lora=lora))

    def graph_key(self, rows: StepRows) -> Hashable | None:
        if not self._uses(rows.slot):
            return False
        return True if self._find(rows.slot)[1] else None

    def _uses(self, slots: Ints) -> bool:
        return bool(self._adapted) and not self._adapted.isdisjoint(slots.tolist())

    def _find(self, slots: Ints) -> tuple[Longs, bool]:
        """Return the adapter slots [R], and whether the kernels support these adapters."""
        adapter_slots = self._adapter_slots[slots]
        used = {*adapter_slots.tolist()} - {0}
        for each in used:
            if each not in self.cache.filled:
                raise EngineError(f"a row uses adapter slot {each}, which is empty")
        return adapter_slots, self.cache.has_kernels_for(used)

    # ---- CUDA graphs -----------------------------------------------------------------------------------------------------

    def allocate_inputs(self, slots: Slots, max_rows: int) -> None:
        self._slots = slots
        self._inputs = torch.zeros(2 * start_size(max_rows), dtype=torch.int32, device=slots.device)

    def write_inputs(self, rows: StepRows | None, count: int) -> None:
        """Rows with the same adapter form a group: write each row's group, then each group's adapter slot."""
        all_rows = np.zeros(count, np.int64)
        if rows is not None:
            all_rows[: len(rows.slot)] = self._adapter_slots[rows.slot]
        distinct, groups = np.unique(all_rows, return_inverse=True)
        packed = np.zeros(2 * start_size(count), np.int32)
        packed[:count] = groups
        packed[start_size(count) :][: len(distinct)] = distinct
        self._slots.updates.write(self._inputs, 0, packed)

    def extend_recorded(self, batch: Batch, count: int) -> Batch:
        room = start_size(count)
        groups, adapter_slots = self._inputs[:count], self._inputs[room : room + count]
        most = min(self._max_loras + 1, count)
        tiles = sort_rows(groups, batch.row_starts, adapter_slots, len(batch.ids), most)
        lora = LoRATokens(np.empty(0, np.int64), batch.ids.device, tiles)
        return replace(batch, tokens=replace(batch.tokens, lora=lora))

    def close(self) -> None:
        self._cache = self._model = self._adapters = self._whole = None


def warm_up_adapters(model: Decoder, device: torch.device, max_tokens: int) -> None:
    """Compile the LoRA kernels for up to `max_tokens` tokens, in parallel. The adapter slot that the rows use is empty."""
    kinds: dict[object, Linear] = {}
    gates: dict[object, GatedMLP] = {}
    latents: dict[object, LatentAttention] = {}
    for layer in model.modules():
        if isinstance(layer, LatentAttention):
            latents.setdefault(layer.core.spec, layer)
        elif isinstance(layer, Linear):
            kinds.setdefault((layer.inputs, layer.outputs, len(layer.sections)), layer)
        elif isinstance(layer, GatedMLP):
            gates.setdefault((layer.gate_up.inputs, layer.gate_up.outputs, layer.activation), layer)
    dtype, jobs = next(model.parameters()).dtype, list[Callable[[], object]]()
    for tokens in sorted({min(size, max_tokens) for size in WARM_UP_TOKENS}):
        slots: npt.NDArray[np.int64] = np.ones(tokens, np.int64)
        rows = LoRATokens(slots, device, tile(slots, device))
        for layer in kinds.values():
            jobs.append(partial(_run_adapted, layer, tokens, layer.inputs, dtype, rows))
        for mlp in gates.values():
            gated = partial(mlp.gate_up.gated, activation=mlp.activation)
            jobs.append(partial(_run_adapted, gated, tokens, mlp.gate_up.inputs, dtype, rows))
        for attention in latents.values():
            jobs.append(partial(_run_latents, attention, tokens, dtype, rows))
    for count in (size for size in WARM_UP_ROWS if size <= max_tokens):  # neighbouring rows have different adapters
        jobs.append(partial(tile, np.arange(count, dtype=np.int64) % 2, device))
    with ThreadPoolExecutor(THREADS, "quire-warm-up") as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


@torch.inference_mode()
def _run_adapted(layer: Callable[..., object], tokens: int, inputs: int, dtype: torch.dtype, rows: LoRATokens) -> None:
    layer(torch.zeros(tokens, inputs, dtype=dtype, device=rows.device), tokens=Tokens(rows))


@torch.inference_mode()
def _run_latents(layer: LatentAttention, tokens: int, dtype: torch.dtype, rows: LoRATokens) -> None:
    bank, spec, up = layer.kv_b_proj.bank, layer.core.spec, layer.latents().up
    assert bank is not None and bank.table is not None and spec.latent is not None
    sizes = spec.head_dim, layer.nope + spec.head_dim - spec.latent, up.shape[1] - layer.nope, spec.latent
    near, query, out, found = (torch.zeros(tokens, spec.heads, size, dtype=dtype, device=rows.device) for size in sizes)
    add_to_near(near, query, up, layer.nope, rows.sorted, bank.table)
    add_to_values(out, found, layer.nope, rows.sorted, bank.table)
