"""Drawing the next token of each row on a GPU: parameters by slot, tokens and faults out.

What it computes is written down in `runner/sampler`, whose stages are the way on a CPU and the oracle of the tests; the random
integers are the same, so both draw the same tokens but for rounding. This file knows no stages and no requests.
"""

import torch
from torch import Tensor

from quire.ops.arguments import FARTHEST, DrawColumns, DrawScratch, Factors


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


def penalize(
    logits: Tensor,
    row: Tensor,
    slot: Tensor,
    end: Tensor,
    prompt: Tensor,
    tokens: Tensor,
    factors: Factors,
    counts: Tensor | None,
    longest: int,
) -> None:
    """Changes logits [N, V] of the rows row [n], whose tokens are tokens [S, L] of slot [n] up to end [n] (<= longest).

    The first prompt [n] of them are the prompt. `counts` [m, V] int32 is memory a GPU counts in: zeros before, zeros after, for
    m rows at a time; a CPU needs none.
    """
    if counts is None:
        reference_penalize(logits, row, slot, end, prompt, tokens, factors, longest)
        return
    from quire.ops.kernels import sample

    for part in range(0, len(row), len(counts)):
        one = slice(part, part + len(counts))
        sample.penalize(logits, row[one], slot[one], end[one], prompt[one], tokens, factors, counts)


def reference_penalize(
    logits: Tensor, row: Tensor, slot: Tensor, end: Tensor, prompt: Tensor, tokens: Tensor, factors: Factors, longest: int
) -> None:
    repetition, frequency, presence = (factor[slot, None] for factor in factors)  # each [n, 1]
    place = torch.arange(longest, device=logits.device)  # [m]
    said = tokens[slot, :longest].long()  # [n, m]
    # places past a row's end repeat its first token: each value below depends on the token alone, so repeats agree
    said = torch.where(place < end[:, None], said, said[:, :1])
    before = logits[row[:, None], said]
    values = torch.where(before > 0, before / repetition, before * repetition)
    if (frequency != 0).any() or (presence != 0).any():
        drawn = (place >= prompt[:, None]) & (place < end[:, None])
        counts = logits.new_zeros(len(row), logits.shape[1]).scatter_add_(1, said, drawn.float()).gather(1, said)
        values -= frequency * counts
        values -= presence * (counts > 0)
    values = torch.where(before > -torch.inf, values.clamp(-FARTHEST, FARTHEST), before)
    logits.index_put_((row[:, None], said), values)


PIECE = 512


def score(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] float32, chosen [n] int64 -> `peak` [n] and `spread` [n], so that logit - peak - spread is the log of a
    probability (NaN or -inf where the logits are broken), and the rank of the chosen token [n] int32: 1 is the most likely one,
    equals share the better rank."""
    if logits.is_cuda:
        from quire.ops.kernels import sample

        return sample.score(logits, chosen)
    return reference_score(logits, chosen)


def reference_score(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    peak = logits.amax(dim=1)
    spread = _sum_rows((logits - peak[:, None]).exp_()).log_()
    rank = (logits > logits.gather(1, chosen[:, None])).sum(dim=1) + 1
    return peak, spread, rank.int()


def _sum_rows(values: Tensor) -> Tensor:
    """values [n, V] -> [n]: in an order of a row's own. torch divides the columns of a few long rows among threads."""
    rows, columns = values.shape
    whole = columns // PIECE * PIECE
    pieces = values[:, :whole].reshape(rows, -1, PIECE).sum(dim=2).sum(dim=1)
    return pieces + values[:, whole:].sum(dim=1)
