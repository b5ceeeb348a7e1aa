"""What the tests of the kernels share."""

import pytest
import torch

# what the interpreter can do, and what only a GPU shows
DTYPES = [torch.float32, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in (torch.float16, torch.bfloat16))]


def close(got, expected):
    loose = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    torch.testing.assert_close(got, expected, atol=loose, rtol=loose)


def numbers(*shape, dtype, device, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
