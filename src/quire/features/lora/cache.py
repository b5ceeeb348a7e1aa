"""The LoRA adapters of one rank: files are read into host memory and copied to device slots.

`RankAdapters` drives the cache of a rank other than the first, which reads the same files at the same time in its own thread:

    first rank's reader   ── ReadAdapter ──►  starts reading; steps go on
    between two steps     ── hold_adapter ─►  waits for the read, and returns its error, if any
                          ── put_adapter ──►  all ranks at once: they may have to exchange values

Each rank packs its own share of the files.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from threading import Lock, Thread

import torch
from torch import Tensor

from quire.features.lora.packing import Adapters, PackedAdapter
from quire.features.lora.peft import AdapterModel, read_adapter
from quire.features.lora.reader import AdapterReader
from quire.features.lora.sites import Site
from quire.features.lora.upload import AdapterUpload, Uploaded
from quire.files.adapter import stamp
from quire.load.assign import Renames
from quire.models.decoder import Decoder
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import AdapterError, EngineError, QuireError, RequestError

MAX_PINNED_BYTES = 1 << 31  # of host memory that is pinned at the start
LAYER_KINDS = {"embedding": "the embedding", "experts": "experts", "head": "the LM head"}  # which kernels do not support


@dataclass(frozen=True)
class WholeModel:
    """The whole model, of which a pipeline stage has some layers."""

    sites: Sequence[Site]
    renames: Renames
    parameters: Set[str]  # names


class LoRACache:
    """The adapters of one rank in host memory and in device slots.

    room: adapter slots (max_loras), numbered from 1
    budget: bytes on the device that all adapters may take together; None: unlimited

    Reading may happen in other threads while steps run; everything else is between steps.
    """

    def __init__(
        self,
        adapters: Adapters,
        model: Decoder,
        room: int,
        max_rank: int,
        budget: int | None = None,
        added_tokens: int = 0,
        whole: "WholeModel | None" = None,
        fixed: str = "",
        kernels_only: bool = False,
    ) -> None:
        """Make an empty cache.

        added_tokens: vocabulary entries that an adapter may add to the model's own
        whole: the whole model, if `model` is a pipeline stage
        fixed: as in `AdapterModel`
        kernels_only: refuse adapters that the device's kernels do not support: PyTorch would compute them and all other
            adapters of the step, with bits that depend on the step's rows
        """
        self._adapters, self._room, self._budget, self._kernels_only = adapters, room, budget, kernels_only
        parameters = dict(model.named_parameters())
        self._model = AdapterModel(adapters.sites, model.renames, parameters, max_rank, added_tokens, fixed=fixed)
        if whole is not None:
            sites = {name: site for site in whole.sites for name in site.shapes}
            other_stages = frozenset(whole.parameters - {*parameters})
            self._model = AdapterModel(
                sites | adapters.sites, whole.renames, parameters, max_rank, added_tokens, other_stages, fixed
            )
        self._upload = AdapterUpload(self._model, adapters) if adapters.tabled else None
        self._held: dict[str, PackedAdapter] = {}
        self._ready: tuple[PackedAdapter, Tensor] | None = None  # the adapter that was read last, and its weights on the device
        self._ahead: tuple[str, str, PackedAdapter, int] | None = None  # read ahead: path, stamp, adapter and its rank
        self._lock = Lock()
        self._taken: dict[int, int] = {}  # slot -> bytes
        self._blocks = 0  # of pinned memory, in use or not
        self._pin(adapters.bytes_of(max_rank), room + 1)
        self.filled: set[int] = set()

    def has_kernels_for(self, slots: Iterable[int]) -> bool:
        return self._adapters.has_kernels_for(slots)

    def warm_up(self) -> None:
        if self._upload is not None:
            self._upload.warm_up()

    def read_ahead(self, ref: AdapterRef) -> None:
        """Read files before their version is known. Files with the same stamp have the same content."""
        if self._upload is None or not ref.stamp or stamp(ref.path) != ref.stamp:
            return
        self._ahead = None
        uploaded = self._upload.read(ref.path)
        if uploaded is not None and stamp(ref.path) == ref.stamp:
            self._ahead = ref.path, ref.stamp, uploaded.packed, uploaded.rank
            self._set_ready(uploaded)

    def read(self, ref: AdapterRef) -> AdapterFacts:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ref.stamp and ahead[:2] == (ref.path, ref.stamp):
            packed, rank = ahead[2:]
        elif self._upload is not None and (uploaded := self._upload.read(ref.path)) is not None:
            packed, rank = uploaded.packed, uploaded.rank
            self._set_ready(uploaded)
        else:
            packed, rank = self._read_on_host(ref)
        with self._lock:
            self._held[ref.version] = packed
        if len(self._held) >= self._blocks:
            self._pin(packed.flat.nbytes, 1)
        return AdapterFacts(rank, packed.flat.nbytes)

    def _set_ready(self, uploaded: Uploaded) -> None:
        with self._lock:
            self._ready = uploaded.packed, uploaded.flat

    def _read_on_host(self, ref: AdapterRef) -> tuple[PackedAdapter, int]:
        additions, rank = read_adapter(ref.path, self._model)
        try:
            packed = self._adapters.pack(additions)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when no host memory is left
            raise AdapterError(f"{ref.path}: no memory is left for the adapter: {error}", "lora_path") from error
        if not packed.finite:
            kind = str(packed.flat.dtype).removeprefix("torch.")
            raise AdapterError(f"{ref.path}: the adapter has weights that are too large for {kind}", "lora_path")
        if self._kernels_only and (kinds := self._adapters.unsupported(packed)):
            raise AdapterError(
                f"{ref.path}: deterministic supports adapters of linear layers only on a GPU; this one changes "
                f"{' and '.join(LAYER_KINDS[kind] for kind in sorted(kinds))}",
                "lora_path",
            )
        return packed, rank

    def _pin(self, size: int, count: int) -> None:
        """Pin `count` buffers in another thread.

        Pinning is slow and delays kernel launches, so buffers are pinned at start, and there is always one for another adapter.
        """
        if self._adapters.pinned:
            count = max(1, min(count, MAX_PINNED_BYTES // max(size, 1)))
            self._blocks += count
            Thread(target=self._adapters.pin, args=(size, count), name="quire-pin", daemon=True).start()

    def put(self, ref: AdapterRef, slot: int) -> None:
        with self._lock:
            packed, flat = self._held.get(ref.version), None
            if self._ready is not None and self._ready[0] is packed:
                (_, flat), self._ready = self._ready, None
        if packed is None:
            raise EngineError(f"{ref.path} was not read, so it cannot be put in adapter slot {slot}")
        if not 1 <= slot <= self._room:
            raise EngineError(f"there are {self._room} adapter slots; got slot {slot}")
        self.drop(slot)
        size = packed.flat.nbytes
        free = size if self._budget is None else self._budget - sum(self._taken.values())
        if size > free:
            raise AdapterError(
                f"{ref.path}: it takes {size:,} bytes on the device; {free:,} are left for adapters", "lora_path"
            )
        try:
            self._adapters.put(slot, packed, flat)
        except torch.OutOfMemoryError as error:
            raise AdapterError(f"{ref.path}: the device has no memory for its {size:,} bytes", "lora_path") from error
        self.filled.add(slot)
        self._taken[slot] = size

    def drop(self, slot: int) -> None:
        self.filled.discard(slot)
        self._taken.pop(slot, None)
        self._adapters.drop(slot)

    def forget(self, version: str) -> None:
        with self._lock:
            packed = self._held.pop(version, None)
            if self._ready is not None and self._ready[0] is packed:
                self._ready = None


READ_WAIT_S = 0.5  # for one wait; it is repeated until the read ends

Wrong = list[str]  # class name and message of an error; empty: no error


class RankAdapters:
    def __init__(self, cache: LoRACache) -> None:
        self._cache, self._reader = cache, AdapterReader(cache.read, cache.read_ahead)
        self._refs: dict[str, AdapterRef] = {}  # by version: requested
        self._outcomes: dict[str, Wrong] = {}  # by version

    def ask(self, ref: AdapterRef) -> None:
        if not ref.version:
            self._reader.ask_ahead(ref)
            return
        self._refs[ref.version] = ref
        self._outcomes.pop(ref.version, None)
        self._reader.ask(ref)

    def hold_adapter(self, version: str) -> Wrong:
        """Wait until the adapter was read; return the error, if any."""
        if version not in self._refs:
            return _wrong(EngineError(f"adapter {version:.8} was never requested"))
        while version not in self._outcomes and self._reader.pending:
            self._reader.wait(READ_WAIT_S)
            for ref, outcome in self._reader.take():
                self._outcomes[ref.version] = _wrong(outcome) if isinstance(outcome, RequestError) else []
        return self._outcomes.get(version, [])

    def put_adapter(self, version: str, slot: int) -> Wrong:
        try:
            self._cache.put(self._refs[version], slot)
        except RequestError as error:
            return _wrong(error)
        return []

    def drop_adapter(self, slot: int) -> None:
        self._cache.drop(slot)

    def forget_adapter(self, version: str) -> None:
        self.hold_adapter(version)  # it may be being read
        self._cache.forget(version)
        self._refs.pop(version, None)
        self._outcomes.pop(version, None)


def _wrong(error: QuireError) -> Wrong:
    return [type(error).__name__, str(error)]
