"""Experts of which ranks have several copies: which of them a token goes to, and how often each expert is asked for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.dist.placement import NOBODY

LOOKED_AT = 8  # of a token's numbers


class Balance:
    """Of one layer. All ranks see the same tokens, and so come to the same choice and the same counts."""

    def __init__(self, experts: int, ranks: Sequence[Sequence[int]], device: torch.device) -> None:
        """ranks: what `place` takes."""
        self.loads = torch.zeros(experts, dtype=torch.int64, device=device)  # tokens, since somebody set it to 0
        self.place(ranks)

    def place(self, ranks: Sequence[Sequence[int]]) -> None:
        """The experts of every rank, place by place. Places are counted through all ranks."""
        self.ranks = [list(experts) for experts in ranks]
        found: list[list[int]] = [[] for _ in self.loads]
        for place, expert in enumerate(expert for experts in ranks for expert in experts):
            if expert != NOBODY:
                found[expert].append(place)
        most = max(map(len, found))
        self._copies = torch.tensor([len(places) for places in found], device=self.loads.device)
        self._places = torch.tensor([places + places[:1] * (most - len(places)) for places in found], device=self.loads.device)

    def choose(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [T, H], experts [T, top_k] -> their places. It depends on the token alone, not on its company."""
        self.loads += torch.bincount(experts.flatten(), minlength=len(self.loads))
        bits = x[:, :LOOKED_AT].contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])
        some = bits.to(torch.int64).sum(-1, keepdim=True)
        return self._places[experts, some % self._copies[experts]]
