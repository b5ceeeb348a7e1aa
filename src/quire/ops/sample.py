"""Drawing the next token of each row on a GPU: parameters by slot, tokens and faults out.

What it computes is written down in `runner/sampler`, whose stages are the way on a CPU and the oracle of the tests; the random
integers are the same, so both draw the same tokens but for rounding. This file knows no stages and no requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP, CHUNK = 128, 2048  # tokens that share a maximum, and tokens that one program scans

GOOD, BROKEN, NOTHING_ALLOWED = 0, 1, 2  # what a row's logits can be


@dataclass(frozen=True)
class DrawColumns:
    """How each slot draws. These stay where they are: recorded launches read them."""

    temperature: Tensor  # [S] float32; 0 = greedy
    top_k: Tensor  # [S] int64; the vocabulary's size = all
    top_p: Tensor  # [S] float32; 1 = all
    min_p: Tensor  # [S] float32; 0 = all
    seed: Tensor  # [S] int64


class DrawScratch:
    """Memory for one draw after the other, of at most `rows` rows."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        chunks, groups = -(-vocabulary // CHUNK), -(-vocabulary // GROUP)
        self.peaks, self.noisy_peaks, self.masses = torch.zeros(3, rows, chunks, dtype=torch.float32, device=device).unbind()
        self.places, self.noisy_places = torch.zeros(2, rows, chunks, dtype=torch.int32, device=device).unbind()
        self.groups = torch.zeros(rows, groups, dtype=torch.float32, device=device)
        self.members = torch.zeros(rows, groups, dtype=torch.int32, device=device)
        self.unedited = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.out = torch.zeros(2, rows, dtype=torch.int32, device=device)  # ids and faults of the latest draw


def draw(
    logits: Tensor,
    drawer: Tensor,
    end: Tensor,
    columns: DrawColumns,
    tokens: Tensor,
    scratch: DrawScratch,
    fault: Tensor | None = None,
) -> Tensor:
    """logits [N, V] float32, drawer and end [N] int64 -> ids and faults [2, >= N] int32, good until the next draw.

    Row i draws for slot drawer[i], into tokens [S, L] int32 at end[i]; where the drawer is -1 nothing is done. `fault` [N]
    int32 is what was wrong with the logits before they were edited; None = they were not.
    """
    from quire.ops.kernels import sample

    sample.draw(logits, drawer, end, columns, tokens, scratch, fault)
    return scratch.out
