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
    Numbers,
    Site,
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

ALIGNED = 64  # every tensor begins at a multiple of this many elements
ROOMY = 4  # a pinned buffer is used if it is less than this many times as large as needed


Where = Mapping[str, Mapping[str, tuple[int, tuple[int, ...]]]]  # site -> its own name -> first element, shape


@dataclass(frozen=True)
class Layout:
    """Where an adapter's weights will be in one buffer."""

    given: Sequence[tuple[str, Tensor | Scaled]]  # the site's own name, and what the file has for it; in the order of `where`
    where: Where
    size: int  # elements
    whole: Mapping[str, Numbers] = field(
        default_factory=dict
    )  # site -> by its own name: integer tensors, which are not in the buffer
    row: "TableRow | None" = None  # of the address table, if writing it is all that the device needs besides the buffer


@dataclass(frozen=True)
class PackedAdapter:
    """One adapter's weights in one host buffer, as the device will have them."""

    flat: Tensor
    where: Where
    whole: Mapping[str, Numbers] = field(default_factory=dict)  # as in its layout
    finite: bool = True  # no weight is NaN or infinite in the model's dtype
    row: "TableRow | None" = None
    known: Numbers = field(default_factory=dict)  # by site: DoRA gains that were computed already
    uploaded: torch.cuda.Event | None = None  # recorded when a device has filled the buffer; None: the host filled it

    def views(self, flat: Tensor) -> Iterator[tuple[str, Numbers]]:
        for site, numbers in self.where.items():
            found = {name: _view(flat, first, shape) for name, (first, shape) in numbers.items()}
            yield site, found | {name: values.to(flat.device) for name, values in self.whole.get(site, {}).items()}


class Adapters:
    """LoRA layers (`sites`) and adapter slots. Slots are numbered from 1.

    tabled: (slots, max rank) of the address table for kernels; None: none
    """

    def __init__(
        self, sites: Sequence[Site], device: torch.device, dtype: torch.dtype, tabled: tuple[int, int] | None = None
    ) -> None:
        self._aside: dict[
            int, tuple[PackedAdapter, Tensor]
        ] = {}  # by slot: adapters that are in the address table, but not in the banks yet
        self.sites: dict[str, Site] = {name: site for site in sites for name in site.shapes}
        self._by_path = {site.path: site for site in sites}
        self.device, self.dtype = device, dtype
        self._piece = 0  # bytes of the buffers that were pinned first
        self._table: AddressTable | None = None if tabled is None else AddressTable(sites, device, *tabled)

    def has_kernels_for(self, places: Iterable[int]) -> bool:
        """Return whether kernels support the adapters in these slots. If not, put them in the banks."""
        if self._table is not None and self._table.unusual.isdisjoint(places):
            return True
        for place in self._aside.keys() & {*places}:
            self._put_in_banks(place, *self._aside.pop(place))
        return False

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
        whole: dict[str, Numbers] = {}
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
        places = [place for numbers in layout.where.values() for place in numbers.values()]
        moves = [(values, _view(flat, *place)) for (_, values), place in zip(layout.given, places, strict=True)]
        finite = in_threads(lambda each: move(*each), moves)
        return PackedAdapter(flat, layout.where, layout.whole, all(finite), layout.row)

    def host_room(self, count: int) -> Tensor:
        """Return a buffer of `count` elements, preferably a part of one that is pinned already."""
        room = self._piece // self.dtype.itemsize
        size = room if count <= room < ROOMY * count else count
        return torch.empty(size, dtype=self.dtype, pin_memory=self.pinned)[:count]

    @property
    def pinned(self) -> bool:
        """Return whether buffers are pinned, so that the device reads them by itself."""
        return self.device.type == "cuda"

    def pin(self, size: int, count: int) -> None:
        """Pre-pin `count` buffers of `size` bytes. torch keeps them for later allocations of this size."""
        self._piece = self._piece or size
        with suppress(RuntimeError):  # no memory is left: a later allocation reports it
            [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    @torch.inference_mode()
    def put(self, place: int, packed: PackedAdapter, flat: Tensor | None = None) -> None:
        """Put an adapter in a slot, between steps. flat: its weights, if they are on the device already."""
        self.drop(place)
        if flat is None:
            if packed.uploaded is not None:
                packed.uploaded.synchronize()  # long since, as a rule
            flat = packed.flat.to(self.device, non_blocking=True) if self.device.type != "cpu" else packed.flat
        elif flat.is_cuda:
            flat.record_stream(
                torch.cuda.current_stream(flat.device)
            )  # steps read it on another stream than the one that made it
        if packed.row is not None and self._table is not None:  # banks would take longer, and steps wait meanwhile
            self._table.write_row(place, packed.row, flat)
            self._aside[place] = packed, flat
            return
        try:
            self._put_in_banks(place, packed, flat)
            if self._table is not None:
                self._table.write(place, {*packed.where})
        except BaseException:
            self.drop(place)
            raise

    def _put_in_banks(self, place: int, packed: PackedAdapter, flat: Tensor) -> None:
        for path, numbers in packed.views(flat):
            self._by_path[path].put(place, numbers, packed.known)

    def drop(self, place: int) -> None:
        self._aside.pop(place, None)
        if self._table is not None:
            self._table.clear(place)
        for site in self._by_path.values():
            site.drop(place)


@dataclass(frozen=True)
class TableRow:
    """A row of the address table with offsets in place of addresses."""

    numbers: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]  # 1: an offset, to which the buffer's address is added


class AddressTable:
    """The address table of LoRA weights for kernels: a row for each adapter slot with an entry for each part of each site.

    Row 0 stays empty. Recorded launches read the table, so its address never changes.
    """

    def __init__(self, sites: Sequence[Site], device: torch.device, places: int, ranks: int) -> None:
        self._sites, self._starts, size = [site for site in sites if site.parts], list[int](), 0
        for site in self._sites:
            self._starts.append(size)
            size += -(-len(site.parts) * ENTRY // 2) * 2  # each begins at a multiple of 16 bytes
        self._rows = torch.zeros(places + 1, size, dtype=torch.int64, device=device)
        self.unusual: set[int] = set()  # slots with weights that kernels do not support
        self._beside = {site.path for site in sites if isinstance(site, ClassSite)}  # run after the layers, without kernels
        for site, start in zip(self._sites, self._starts, strict=True):
            assert isinstance(site, LinearSite)
            site.use_table(self._rows.view(-1)[start:], size, ranks)

    def write(self, place: int, paths: Set[str]) -> None:
        """Write the row of the adapter that is in this slot now. paths: its sites."""
        row: npt.NDArray[np.int64] = np.zeros(self._rows.shape[1], np.int64)
        for site, start in zip(self._sites, self._starts, strict=True):
            if site.path in paths:
                numbers = np.array(site.tabulate(place), np.int64).ravel()
                row[start : start + len(numbers)] = numbers
        self._write(place, row)
        if paths - {site.path for site in self._sites} - self._beside:
            self.unusual.add(place)

    def row_of(self, where: Where, itemsize: int) -> TableRow | None:
        """Return the row of an adapter, or None if it has more than low-rank matrices."""
        row: npt.NDArray[np.int64] = np.zeros((2, self._rows.shape[1]), np.int64)
        known = 0
        for site, start in zip(self._sites, self._starts, strict=True):
            if site.path in where:
                assert isinstance(site, LinearSite)
                for number, entry in enumerate(site.places(where[site.path])):
                    if entry is not None:
                        down, up, rank = entry
                        at = start + number * ENTRY
                        row[0, at : at + 3] = down * itemsize, up * itemsize, rank
                        row[1, at : at + 2] = 1
                        known += 2
        return TableRow(*row) if known == sum(map(len, where.values())) else None

    def write_row(self, place: int, row: TableRow, flat: Tensor) -> None:
        self._write(place, row.numbers + row.addresses * flat.data_ptr())

    def _write(self, place: int, row: npt.NDArray[np.int64]) -> None:
        on_host = torch.from_numpy(row)
        self._rows[place].copy_(on_host.pin_memory() if self._rows.is_cuda else on_host, non_blocking=True)

    def clear(self, place: int) -> None:
        self._rows[place].zero_()
        self.unusual.discard(place)


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
    return -(-count // ALIGNED) * ALIGNED


def _view(flat: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return flat[first : first + count].view(shape)
