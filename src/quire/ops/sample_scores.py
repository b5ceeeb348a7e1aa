"""What logprobs need of a whole row of logits: peak, mass, and how many tokens are more likely than the chosen one."""

from torch import Tensor


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
    spread = (logits - peak[:, None]).exp_().sum(dim=1).log_()
    rank = (logits > logits.gather(1, chosen[:, None])).sum(dim=1) + 1
    return peak, spread, rank.int()
