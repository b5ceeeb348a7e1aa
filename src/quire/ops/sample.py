"""Sample the next token of each row on a GPU: parameters by slot, tokens and faults out.

`runner/sampler` defines the computation: its stages run on a CPU and are the tests' reference. The random integers are the
same, so both sample the same tokens except for rounding. This file knows neither stages nor requests.
"""

import torch
from torch import Tensor

from quire.ops.arguments import MAX_PENALIZED_LOGIT, Factors, SampleColumns, SampleScratch


def sample_rows(
    logits: Tensor,
    sampling_slot: Tensor,
    end: Tensor,
    columns: SampleColumns,
    tokens: Tensor,
    scratch: SampleScratch,
    fault: Tensor | None = None,
) -> Tensor:
    """Return ids and faults [2, >= N] int32, valid until the next call, for logits [N, V] float32.

    sampling_slot, end: [N] int64: row i samples for slot sampling_slot[i], into tokens [S, L] int32 at end[i]; -1: nothing
    fault: [N] int32 faults of the logits before they were edited; None: not edited
    """
    from quire.ops.kernels import sample

    sample.sample_rows(logits, sampling_slot, end, columns, tokens, scratch, fault)
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
    """Apply penalties to logits [N, V] of rows row [n], whose tokens are tokens [S, L] of slot [n] up to end [n] (<= longest).

    prompt: [n] tokens of the prompt
    counts: [m, V] int32 scratch of a GPU for m rows at a time, zero before and after; None: CPU
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
    history = tokens[slot, :longest].long()  # [n, m]
    # positions after a row's end repeat its first token: each value depends on the token only, so repeats agree
    history = torch.where(place < end[:, None], history, history[:, :1])
    before = logits[row[:, None], history]
    values = torch.where(before > 0, before / repetition, before * repetition)
    if (frequency != 0).any() or (presence != 0).any():
        sampled = (place >= prompt[:, None]) & (place < end[:, None])
        counts = logits.new_zeros(len(row), logits.shape[1]).scatter_add_(1, history, sampled.float()).gather(1, history)
        values -= frequency * counts
        values -= presence * (counts > 0)
    values = torch.where(before > -torch.inf, values.clamp(-MAX_PENALIZED_LOGIT, MAX_PENALIZED_LOGIT), before)
    logits.index_put_((row[:, None], history), values)


SUM_COLUMNS = 512


def score(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `peak` [n] and `spread` [n], so that logit - peak - spread is the log probability (NaN or -inf for broken logits),
    and the rank of the chosen token [n] int32: 1 is the most likely one, equals share the better rank.

    logits: [n, V] float32
    chosen: [n] int64
    """
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
    """Return sums of values [n, V] in an order that does not depend on n: torch divides the columns of a few long rows among
    threads."""
    rows, columns = values.shape
    whole = columns // SUM_COLUMNS * SUM_COLUMNS
    chunks = values[:, :whole].reshape(rows, -1, SUM_COLUMNS).sum(dim=2).sum(dim=1)
    return chunks + values[:, whole:].sum(dim=1)
