"""Penalties on the logits of tokens that were already said: counted from the rows' own tokens, each time anew."""

import torch
from torch import Tensor

from quire.ops.arguments import FARTHEST, Factors


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
    from quire.ops.kernels import sample_penalties

    for part in range(0, len(row), len(counts)):
        one = slice(part, part + len(counts))
        sample_penalties.penalize(logits, row[one], slot[one], end[one], prompt[one], tokens, factors, counts)


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
