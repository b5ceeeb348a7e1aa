"""Adapters' tensors for experts, which come in two forms: two matrices for each matrix of each expert, or, for a parameter that
has all experts, two with all of them beside each other.

    A [E * rank, inputs]: expert after expert      B [outputs, rank * E]: of each rank all experts
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quire.features.lora.sites import Addition, ExpertsSite, Site

if TYPE_CHECKING:
    from quire.features.lora.peft import Named

ONE = re.compile(r"^(?P<path>.+)\.(?P<expert>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)$")
NESTED = ".base_layer"  # of a parameter whose neighbour has additions, too

Place = tuple[ExpertsSite, int | None, str]  # the expert, None = all; which of its matrices, "" = its shape tells


class Terms(Protocol):
    """What the configuration says of a module, or of a parameter of one."""

    def check_rank(self, named: "Named", rank: int, module: str, merged: int = 1) -> None:
        """`merged`: matrices whose ranks lie beside each other in it."""

    def check_size(self, down: "Named", up: "Named", module: str) -> None: ...

    def scale_of(self, module: str) -> float: ...


@dataclass(frozen=True)
class Pair:
    down: "Named"
    up: "Named"
    rank: int
    module: str  # as transformers calls it


@dataclass
class ExpertTensors:
    terms: Terms
    _stacks: dict[str, list[Pair]] = field(default_factory=dict)
    _single: dict[str, dict[tuple[int, str], Pair]] = field(default_factory=dict)

    def find(self, path: str, sites: Mapping[str, Site]) -> Place | None:
        match = ONE.match(path)
        if match is not None and isinstance(site := sites.get(match["path"]), ExpertsSite):
            return site, int(match["expert"]), match["matrix"]
        while path.endswith(NESTED):
            path = path.removesuffix(NESTED)
        site = sites.get(path)
        return (site, None, "") if isinstance(site, ExpertsSite) else None

    def add(self, place: Place, down: "Named", up: "Named", module: str) -> None:
        site, expert, matrix = place
        if down.values.ndim != 2 or up.values.ndim != 2:
            raise down.wrong(f"and its lora_B must be matrices, but are {list(down.values.shape)} and {list(up.values.shape)}")
        rank, rest = divmod(down.values.shape[0], site.count if expert is None else 1)
        if rest or down.values.shape[0] != up.values.shape[1]:
            raise down.wrong(f"of shape {list(down.values.shape)} does not go with lora_B of shape {list(up.values.shape)}")
        if not site.holds_floats:
            raise down.wrong("adds to experts, which are held in few bits on this device")
        pair = Pair(down, up, rank, module.replace(NESTED, ""))
        self.terms.check_size(down, up, pair.module)
        if expert is None:
            self._stacks.setdefault(site.path, []).append(pair)
            return
        self.terms.check_rank(down, rank, module)
        if site.together:
            raise down.wrong("is of one expert, where the model has all in one parameter")
        if expert >= site.count:
            raise down.wrong(f"is of expert {expert}; the model has {site.count}")
        outputs, inputs = (site.hidden, site.inner) if matrix == "down_proj" else (site.inner, site.hidden)
        for named, shape in ((down, (rank, inputs)), (up, (outputs, rank))):
            if tuple(named.values.shape) != shape:
                raise named.wrong(f"has shape {list(named.values.shape)}, where the model needs {list(shape)}")
        self._single.setdefault(site.path, {})[expert, matrix] = pair

    def finish(self, sites: Mapping[str, Site]) -> dict[str, Addition]:
        found: dict[str, Addition] = {}
        swapped = any(_lies_across(pair, sites[path]) for path, pairs in self._stacks.items() for pair in pairs)
        for path, pairs in self._stacks.items():
            both: dict[str, tuple[Tensor, Tensor]] = {}
            for pair in pairs:
                name, (down, up) = _unfold(pair, sites[path], swapped)
                if name in both or path in self._single:
                    raise pair.down.wrong("is a second addition to the same experts")
                self.terms.check_rank(pair.down, pair.rank, f"{pair.module}.{name}", 2 if name == "gate_up_proj" else 1)
                both[name] = down, up * self.terms.scale_of(f"{pair.module}.{name}")
            found[path] = Addition(gate_up=both.get("gate_up_proj"), back=both.get("down_proj"))
        for path, single in self._single.items():
            site = sites[path]
            assert isinstance(site, ExpertsSite)
            found[path] = self._stack(site, single)
        return found

    def _stack(self, site: ExpertsSite, single: Mapping[tuple[int, str], Pair]) -> Addition:
        """Experts of one layer take the room of the largest rank among them."""
        gate_up = {key: pair for key, pair in single.items() if key[1] != "down_proj"}
        back = {key: pair for key, pair in single.items() if key[1] == "down_proj"}
        both: list[tuple[Tensor, Tensor] | None] = []
        for pairs, outputs, inputs in ((gate_up, 2 * site.inner, site.hidden), (back, site.hidden, site.inner)):
            if not pairs:
                both.append(None)
                continue
            totals = [sum(pair.rank for (owner, _), pair in pairs.items() if owner == expert) for expert in range(site.count)]
            down = torch.zeros(site.count, max(totals), inputs)
            up = torch.zeros(site.count, outputs, max(totals))
            used = [0] * site.count
            for (expert, matrix), pair in pairs.items():
                first, last = used[expert], used[expert] + pair.rank
                scale, start = self.terms.scale_of(pair.module), site.inner if matrix == "up_proj" else 0
                down[expert, first:last] = pair.down.values.float()
                up[expert, start : start + pair.up.values.shape[0], first:last] = pair.up.values.float() * scale
                used[expert] = last
            both.append((down, up))
        return Addition(gate_up=both[0], back=both[1])


def _lies_across(pair: Pair, site: Site) -> bool:
    """PEFT once took a parameter [E, outputs, inputs] for one of [E, inputs, outputs]: is it certain that it did here?"""
    assert isinstance(site, ExpertsSite)
    shape = (pair.up.values.shape[0], pair.down.values.shape[1])
    across = {(site.hidden, 2 * site.inner), (site.inner, site.hidden)}
    return shape in across and shape not in {(2 * site.inner, site.hidden), (site.hidden, site.inner)}


def _unfold(pair: Pair, site: Site, swapped: bool) -> tuple[str, tuple[Tensor, Tensor]]:
    assert isinstance(site, ExpertsSite)
    experts, rank = site.count, pair.rank
    down = pair.down.values.float().view(experts, rank, -1)  # [E, rank, K]
    up = pair.up.values.float().view(-1, rank, experts).permute(2, 0, 1)  # [E, N, rank]
    if swapped:
        down, up = up.mT, down.mT
    shape = (up.shape[1], down.shape[2])
    wanted = {(2 * site.inner, site.hidden): "gate_up_proj", (site.hidden, site.inner): "down_proj"}
    if shape not in wanted:
        sizes = " or ".join(f"{n} x {k}" for n, k in wanted)
        raise pair.down.wrong(f"and its lora_B add {shape[0]} x {shape[1]} to every expert, where the model has {sizes}")
    return wanted[shape], (down, up)
