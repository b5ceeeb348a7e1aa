"""Random weights, for measuring without a checkpoint. A tensor's values depend on the seed and its name alone."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

SPREAD = 0.02


class DummySource:
    """Fills the places it is given, on their own device."""

    def __init__(self, table: Mapping[str, Tensor | None], seed: int) -> None:
        self.places = {name: view for name, view in table.items() if view is not None}
        self.seed = seed

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(view.shape) for name, view in self.places.items()}

    def read(self, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        generators: dict[torch.device, torch.Generator] = {}
        for name, view in self.places.items():
            if name not in names:
                continue
            generator = generators.setdefault(view.device, torch.Generator(view.device))
            generator.manual_seed(int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:7], "little"))
            values = torch.empty(view.shape, dtype=view.dtype, device=view.device)
            yield name, values.normal_(0.0, SPREAD, generator=generator)

    def find_rows(self, name: str) -> None:  # noqa: ARG002
        return None
