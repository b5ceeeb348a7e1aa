"""What logprobs need of a whole row of logits: peak, mass, and how many tokens are more likely than the chosen one."""

from torch import Tensor

PIECE = 512


def score(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] float32, chosen [n] int64 -> `peak` [n] and `spread` [n], so that logit - peak - spread is the log of a
    probability (NaN or -inf where the logits are broken), and the rank of the chosen token [n] int32: 1 is the most likely one,
    equals share the better rank."""
    if logits.is_cuda:
        from quire.ops.kernels import sample_scores

        return sample_scores.score(logits, chosen)
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
