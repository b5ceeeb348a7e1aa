"""Pack an adapter's weights into one host buffer and copy them to the LoRA banks of the layers.

    a file's tensors ─► Addition, by matrix ─► PackedAdapter: this rank's share in one host buffer ─► banks, by adapter slot

An adapter takes the memory of its own rank (r): nothing is padded to the rank of another adapter or to max_lora_rank. This file
knows neither file formats nor requests.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire.features.lora.sites import (
    Addition,
    ClassSite,
    EmbeddingSite,
    ExpertsSite,
    HeadSite,
    LatentSite,
    LinearSite,
    Site,
    Weights,
)
from quire.features.lora.values import Scaled, move
from quire.files.threads import in_threads
from quire.layers.class_linear import ClassLinear
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.parameter import Role
from quire.ops.adapters import ENTRY
from quire.types.errors import ConfigError

ALIGNMENT = 64  # elements; every tensor begins at a multiple
MAX_OVERSIZE = 4  # a pinned buffer is used if it is less than this many times as large as needed


Where = Mapping[str, Mapping[str, tuple[int, tuple[int, ...]]]]  # site -> its own name -> first element, shape


@dataclass(frozen=True)
class Layout:
    """Where an adapter's weights will be in one buffer."""

    given: Sequence[tuple[str, Tensor | Scaled]]  # the site's own name, and the file's tensor; in the order of `where`
    where: Where
    size: int  # elements
    whole: Mapping[str, Weights] = field(
        default_factory=dict
    )  # site -> by its own name: integer tensors, which are not in the buffer
    row: "TableRow | None" = None  # of the address table; None: the adapter has more than low-rank matrices


@dataclass(frozen=True)
class PackedAdapter:
    """One adapter's weights in one host buffer, as the device will have them."""

    flat: Tensor
    where: Where
    whole: Mapping[str, Weights] = field(default_factory=dict)  # as in its layout
    finite: bool = True  # no weight is NaN or infinite in the model's dtype
    row: "TableRow | None" = None
    known: Weights = field(default_factory=dict)  # by site: DoRA gains that were computed already
    uploaded: torch.cuda.Event | None = None  # recorded when a device has filled the buffer; None: the host filled it

    def views(self, flat: Tensor) -> Iterator[tuple[str, Weights]]:
        for site, tensors in self.where.items():
            found = {name: _view(flat, first, shape) for name, (first, shape) in tensors.items()}
            yield site, found | {name: values.to(flat.device) for name, values in self.whole.get(site, {}).items()}


class Adapters:
    """LoRA layers (`sites`) and adapter slots. Slots are numbered from 1.

    tabled: (slots, max rank) of the address table for kernels; None: none
    """

    def __init__(
        self, sites: Sequence[Site], device: torch.device, dtype: torch.dtype, tabled: tuple[int, int] | None = None
    ) -> None:
        # by slot: adapters that are in the address table, but not in the banks yet
        self._table_only: dict[int, tuple[PackedAdapter, Tensor]] = {}
        self.sites: dict[str, Site] = {name: site for site in sites for name in site.shapes}
        self._by_path = {site.path: site for site in sites}
        self.device, self.dtype = device, dtype
        self._pinned_bytes = 0  # of each buffer that was pinned first
        self._table: AddressTable | None = None if tabled is None else AddressTable(sites, device, *tabled)

    def has_kernels_for(self, slots: Iterable[int]) -> bool:
        """Return whether kernels support the adapters in these slots. If not, put them in the banks."""
        if self._table is not None and self._table.unusual.isdisjoint(slots):
            return True
        for slot in self._table_only.keys() & {*slots}:
            self._put_in_banks(slot, *self._table_only.pop(slot))
        return False

    def unsupported(self, packed: PackedAdapter) -> set[str]:
        """Return the kinds of layers in an adapter that kernels do not support; empty without kernels."""
        found = set() if self._table is None else self._table.unsupported({*packed.where, *packed.whole})
        return {self._by_path[path].kind for path in found}

    @property
    def tabled(self) -> bool:
        return self._table is not None

    def bytes_of(self, rank: int) -> int:
        """Return the bytes of an adapter of this rank that changes every linear layer, with biases, DoRA magnitudes and a
        classification head of its own."""
        linear = [site for site in self._by_path.values() if isinstance(site, LinearSite)]
        shapes = [(width, site.inputs) for site in linear for _, width in site.parts]
        sizes = [size for outputs, inputs in shapes for size in (outputs * rank, inputs * rank, outputs, outputs)]
        classes = [shape for site in linear if isinstance(site, ClassSite) for shape in site.shapes.values()]
        sizes += [size for outputs, inputs in classes for size in (outputs * inputs, outputs)]
        return sum(map(_aligned, sizes)) * self.dtype.itemsize

    def lay_out(self, additions: Mapping[str, Addition]) -> Layout:
        """Return where this rank's share of an adapter will be.

        additions: by the matrix's path in the checkpoint, after renames; shapes were checked. Those of layers of another
            pipeline stage are ignored.
        """
        by_site: dict[str, dict[str, Addition]] = {}
        for name, addition in additions.items():
            if name in self.sites:
                by_site.setdefault(self.sites[name].path, {})[name] = addition
        given: list[tuple[str, Tensor | Scaled]] = []
        where: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {}
        whole: dict[str, Weights] = {}
        at = 0
        for path, found in by_site.items():
            where[path] = {}
            for name, values in self._by_path[path].cut(found).items():
                if isinstance(values, Tensor) and not values.is_floating_point():
                    whole.setdefault(path, {})[name] = values
                    continue
                shape = (values.values if isinstance(values, Scaled) else values).shape
                where[path][name] = (at, tuple(shape))
                given.append((name, values))
                at += _aligned(shape.numel())
        row = None if self._table is None or whole else self._table.row_of(where, self.dtype.itemsize)
        return Layout(given, where, at, whole, row)

    def pack(self, additions: Mapping[str, Addition]) -> PackedAdapter:
        """Pack an adapter on the host. additions: see `lay_out`."""
        layout = self.lay_out(additions)
        flat = self.host_room(layout.size)
        spans = [span for tensors in layout.where.values() for span in tensors.values()]
        moves = [(values, _view(flat, *span)) for (_, values), span in zip(layout.given, spans, strict=True)]
        finite = in_threads(lambda each: move(*each), moves)
        return PackedAdapter(flat, layout.where, layout.whole, all(finite), layout.row)

    def host_room(self, count: int) -> Tensor:
        """Return a buffer of `count` elements, preferably a part of one that is pinned already."""
        room = self._pinned_bytes // self.dtype.itemsize
        size = room if count <= room < MAX_OVERSIZE * count else count
        return torch.empty(size, dtype=self.dtype, pin_memory=self.pinned)[:count]

    @property
    def pinned(self) -> bool:
        """Return whether buffers are pinned, so that the device reads them by itself."""
        return self.device.type == "cuda"

    def pin(self, size: int, count: int) -> None:
        """Pre-pin `count` buffers of `size` bytes. torch keeps them for later allocations of this size."""
        self._pinned_bytes = self._pinned_bytes or size
        with suppress(RuntimeError):  # no memory is left: a later allocation reports it
            [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    @torch.inference_mode()
    def put(self, slot: int, packed: PackedAdapter, flat: Tensor | None = None) -> None:
        """Put an adapter in a slot, between steps. flat: its weights, if they are on the device already."""
        self.drop(slot)
        if flat is None:
            if packed.uploaded is not None:
                packed.uploaded.synchronize()  # usually it has been recorded already
            flat = packed.flat.to(self.device, non_blocking=True) if self.device.type != "cpu" else packed.flat
        elif flat.is_cuda:
            flat.record_stream(
                torch.cuda.current_stream(flat.device)
            )  # steps read it on another stream than the one that made it
        if packed.row is not None and self._table is not None:  # filling banks takes longer, and delays steps
            self._table.write_row(slot, packed.row, flat)
            self._table_only[slot] = packed, flat
            return
        try:
            self._put_in_banks(slot, packed, flat)
            if self._table is not None:
                self._table.write(slot, {*packed.where})
        except BaseException:
            self.drop(slot)
            raise

    def _put_in_banks(self, slot: int, packed: PackedAdapter, flat: Tensor) -> None:
        for path, weights in packed.views(flat):
            self._by_path[path].put(slot, weights, packed.known)

    def drop(self, slot: int) -> None:
        self._table_only.pop(slot, None)
        if self._table is not None:
            self._table.clear(slot)
        for site in self._by_path.values():
            site.drop(slot)


@dataclass(frozen=True)
class TableRow:
    """A row of the address table with offsets in place of addresses."""

    entries: npt.NDArray[np.int64]
    is_offset: npt.NDArray[np.int64]  # 1: the buffer's address is added to the entry


class AddressTable:
    """The address table of LoRA weights for kernels: a row for each adapter slot with an entry for each part of each site.

    Row 0 stays empty. Recorded launches read the table, so its address never changes.
    """

    def __init__(self, sites: Sequence[Site], device: torch.device, slots: int, ranks: int) -> None:
        self._sites, self._starts, size = [site for site in sites if site.parts], list[int](), 0
        for site in self._sites:
            self._starts.append(size)
            size += -(-len(site.parts) * ENTRY // 2) * 2  # each begins at a multiple of 16 bytes
        self._rows = torch.zeros(slots + 1, size, dtype=torch.int64, device=device)
        self.unusual: set[int] = set()  # slots with weights that kernels do not support
        self._classes = {site.path for site in sites if isinstance(site, ClassSite)}
        for site, start in zip(self._sites, self._starts, strict=True):
            assert isinstance(site, LinearSite)
            site.use_table(self._rows.view(-1)[start:], size, ranks)

    def write(self, slot: int, paths: Set[str]) -> None:
        """Write the row of the adapter that is in this slot now. paths: its sites."""
        row: npt.NDArray[np.int64] = np.zeros(self._rows.shape[1], np.int64)
        for site, start in zip(self._sites, self._starts, strict=True):
            if site.path in paths:
                entries = np.array(site.tabulate(slot), np.int64).ravel()
                row[start : start + len(entries)] = entries
        self._write(slot, row)
        if self.unsupported(paths):
            self.unusual.add(slot)

    def unsupported(self, paths: Set[str]) -> Set[str]:
        """Return those of these sites that kernels do not support."""
        return paths - {site.path for site in self._sites} - self._classes

    def row_of(self, where: Where, itemsize: int) -> TableRow | None:
        """Return the row of an adapter, or None if it has more than low-rank matrices."""
        row: npt.NDArray[np.int64] = np.zeros((2, self._rows.shape[1]), np.int64)
        known = 0
        for site, start in zip(self._sites, self._starts, strict=True):
            if site.path in where:
                assert isinstance(site, LinearSite)
                for number, entry in enumerate(site.offsets(where[site.path])):
                    if entry is not None:
                        down, up, rank = entry
                        at = start + number * ENTRY
                        row[0, at : at + 3] = down * itemsize, up * itemsize, rank
                        row[1, at : at + 2] = 1
                        known += 2
        return TableRow(*row) if known == sum(map(len, where.values())) else None

    def write_row(self, slot: int, row: TableRow, flat: Tensor) -> None:
        self._write(slot, row.entries + row.is_offset * flat.data_ptr())

    def _write(self, slot: int, row: npt.NDArray[np.int64]) -> None:
        on_host = torch.from_numpy(row)
        self._rows[slot].copy_(on_host.pin_memory() if self._rows.is_cuda else on_host, non_blocking=True)

    def clear(self, slot: int) -> None:
        self._rows[slot].zero_()
        self.unusual.discard(slot)


def adapt(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, tabled: tuple[int, int] | None = None, more: int = 0
) -> Adapters:
    """Give every layer with matrices a LoRA bank; after `shard`, before or after weights are loaded.

    tabled: see `Adapters`
    more: tokens that adapters may add to the model's own
    """
    return Adapters(find_sites(model, more), device, dtype, tabled)


def find_sites(model: nn.Module, more: int = 0) -> list[Site]:
    sites: list[Site] = []
    for path, layer in model.named_modules():
        match layer:
            case ClassLinear():
                sites.append(ClassSite(path, layer))
            case Linear(as_floats=True):
                sites.append(LatentSite(path, layer))
            case Linear():
                sites.append(LinearSite(path, layer))
            case Head():
                sites.append(HeadSite(path, layer, more))
            case Embedding(role=Role.VOCABULARY):
                sites.append(EmbeddingSite(path, layer, more))
            case Experts():
                sites.append(ExpertsSite(path, layer))
    if not any(site.kind == "linear" for site in sites):
        raise ConfigError(
            "LoRA adapters (enable_lora) need a model of a family of our own; this one is run through transformers"
        )
    return sites


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _view(flat: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return flat[first : first + count].view(shape)
