"""What the tests of the kernels share."""

import itertools
from typing import Any

import pytest
import torch

from quire.ops.kv import kv_scales, round_kv

# what the interpreter can do, and what only a GPU shows
DTYPES = [torch.float32, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in (torch.float16, torch.bfloat16))]


def pairwise(*axes: list[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which each two values of different axes meet; all of them on a GPU, where they cost little."""
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = combinations if torch.cuda.is_available() else []
    missing = {pair for each in combinations for pair in itertools.combinations(enumerate(each), 2)}
    while missing and chosen is not combinations:
        best = max(combinations, key=lambda each: len(missing.intersection(itertools.combinations(enumerate(each), 2))))
        missing -= {*itertools.combinations(enumerate(best), 2)}
        chosen.append(best)
    return [tuple(axis[index] for axis, index in zip(axes, each, strict=True)) for each in chosen]


def close(got, expected):
    loose = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    torch.testing.assert_close(got, expected, atol=loose, rtol=loose)


def numbers(*shape, dtype, device, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def matrix(outputs, inner, dtype, device):
    """Weights may be read before the previous kernel has ended, so they are finished here."""
    weight = numbers(outputs, inner, dtype=dtype, device=device, seed=1) * inner**-0.5
    if weight.is_cuda:
        torch.cuda.synchronize()
    return weight


def distance(got, expected):
    return ((got.float() - expected).norm() / expected.norm()).item()


def float8_cache(kv, kind):
    """A cache [pages, 2, kv_heads, page_size, head_dim] rounded to 8 bits, as one with scales behind each page's numbers."""
    pages, _, heads, page_size, head_dim = kv.shape
    raw = torch.zeros(pages, 2 * heads * page_size * (head_dim + 4) + 16, dtype=torch.uint8, device=kv.device)
    packed = raw[:, : 2 * heads * page_size * head_dim].view(kind).view(kv.shape)
    numbers, scales = round_kv(kv, kind)
    packed.view(torch.uint8).copy_(numbers.view(torch.uint8))
    kv_scales(packed).copy_(scales)
    return packed
