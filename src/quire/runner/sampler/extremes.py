"""Searches and cuts over the whole vocabulary, each in its fastest form for the device."""

import numpy as np
import torch
from torch import Tensor


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, V] -> value [N] and index [N] int64 of the maximum; the first of equals. NaN counts as largest."""
    if logits.device.type != "cpu":
        value, index = logits.max(dim=1)
        return value, index
    index = torch.from_numpy(np.argmax(logits.numpy(), axis=1))  # vectorized, unlike torch's
    return logits.gather(1, index[:, None]).squeeze(1), index


def top_values(logits: Tensor, count: int) -> Tensor:
    """logits [N, V] -> the `count` largest values of each row [N, count] in falling order."""
    if logits.device.type != "cpu":
        if count == logits.shape[1]:
            return logits.sort(dim=1, descending=True).values
        return logits.topk(count, dim=1).values
    values = logits.numpy()
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def drop_below(logits: Tensor, least: Tensor) -> Tensor:
    """Puts -inf, in place, where logits [N, V] are smaller than least [N]."""
    if logits.device.type != "cpu":
        return logits.masked_fill_(logits < least[:, None], -torch.inf)
    below = least.nextafter(torch.tensor(-torch.inf))  # threshold_ keeps what is strictly larger, an order faster than masks
    for row, bound in zip(logits, below.tolist(), strict=True):
        torch.threshold_(row, bound, -torch.inf)
    return logits
