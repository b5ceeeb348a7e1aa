"""The Triton kernels that treat every token by itself, against their torch references."""

import pytest
import torch
from kernel_support import DTYPES, close, float8_cache, numbers, pairwise

from quire.ops.activation import ACTIVATIONS, reference_gated
from quire.ops.arguments import HeadNorms, Rotation
from quire.ops.kv import kv_gather, kv_scales
from quire.ops.norm import reference_rms_norm
from quire.ops.qkv import reference_place_heads

pytest.importorskip("triton")
from quire.ops.kernels import activation, norm, qkv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "offset"), [((5, 64), 0.0), ((3, 4, 48), 1.0), ((1, 1000), 1.0), ((2, 4096), 0.0), ((0, 8), 0.0)]
)
def test_rms_norm(shape, offset, dtype, device):
    x, residual = (numbers(*shape, dtype=dtype, device=device, seed=seed) * 3 for seed in (1, 2))
    weight = numbers(shape[-1], dtype=dtype, device=device)
    close(norm.rms_norm(x, weight, 1e-5, offset), reference_rms_norm(x, weight, 1e-5, offset))
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert torch.equal(total, x + residual)
    close(normed, reference_rms_norm(x + residual, weight, 1e-5, offset))


def test_rms_norm_of_a_view(device):
    x, weight = numbers(6, 4, 32, dtype=torch.float32, device=device), torch.ones(32, device=device)
    close(norm.rms_norm(x[:, 1:3], weight, 1e-5, 0.0), reference_rms_norm(x[:, 1:3], weight, 1e-5, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 10), (2, 3, 2048), (3, 2500), (0, 4)])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated(name, shape, dtype, device):
    x = numbers(*shape, dtype=dtype, device=device) * 4
    close(activation.gated(x, name), reference_gated(x, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("turned", "offset", "shape"),  # the share of a head that rotates, negative: interleaved; of the norm, None: no norm
    pairwise(
        [None, 1.0, 0.75, 0.5, -1.0, -0.5], [None, 0.0, 1.0], [(6, 2, 16, 4), (9, 3, 24, 16), (1, 1, 128, 32), (5, 5, 80, 1)]
    ),
)
def test_heads(shape, offset, turned, dtype, device):
    heads, kv_heads, head_dim, page_size = shape
    tokens, pages = 5, 40
    projected = numbers(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.tensor([0, 7, 3, 29, 30], device=device)
    write = (
        torch.tensor([9, 0, 3, 2, 30], device=device) * page_size + torch.tensor([0, 3, 1, 7, 15], device=device) % page_size
    )
    rotation = norms = None
    if turned is not None:
        angles = torch.outer(torch.arange(31.0), torch.rand(int(head_dim * abs(turned)) // 2)).to(device)
        rotation = Rotation(angles.cos(), angles.sin(), interleaved=turned < 0)
    if offset is not None:
        weights = (numbers(head_dim, dtype=dtype, device=device, seed=seed) for seed in (3, 4))
        norms = HeadNorms(*weights, 1e-5, offset)
    # pages lie further apart than they are long
    caches = [torch.full((pages, 3, kv_heads, page_size, head_dim), -7.0, dtype=dtype, device=device)[:, :2] for _ in range(2)]
    expected = reference_place_heads(projected.clone(), caches[0], write, positions, rotation, norms)
    got = qkv.place_heads(projected.clone(), caches[1], write, positions, rotation, norms)
    close(got, expected.contiguous())
    close(caches[1], caches[0])
    assert (caches[1] != -7.0).any(dim=-1).sum() == tokens * 2 * kv_heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "turned"), [(6, 2, 16, 1.0), (9, 3, 24, 0.5), (2, 2, 80, None)])
def test_heads_go_to_a_cache_of_8_bits(heads, kv_heads, head_dim, turned, given, kind, dtype, device):
    """The very bits of the reference, whose conversions are torch's; numbers of all sizes, and some that are all zeros."""
    tokens, pages, page_size = 7, 20, 4
    projected = numbers(tokens, (heads + 2 * kv_heads) * head_dim, dtype=torch.float32, device=device)
    projected *= torch.exp2(torch.randint(-12, 3, projected.shape, generator=torch.Generator().manual_seed(4)).to(device))
    projected[2, heads * head_dim :] = 0.0
    projected = projected.to(dtype)
    rotation = None
    if turned is not None:
        angles = torch.arange(9, device=device)[:, None] * torch.linspace(0.1, 1.0, int(head_dim * turned) // 2, device=device)
        rotation = Rotation(angles.cos(), angles.sin())
    write, positions = (torch.tensor(at, device=device) for at in ([9, 4, 30, 77, 5, 6, 52], [0, 3, 1, 8, 5, 6, 2]))
    scales = torch.rand(2, kv_heads, device=device) * 0.01 + 0.001 if given else None
    empty = torch.zeros(pages, 2, kv_heads, page_size, head_dim, device=device)
    caches = [float8_cache(empty, kind) for _ in range(2)]
    expected = reference_place_heads(projected.clone(), caches[0], write, positions, rotation, None, scales)
    got = qkv.place_heads(projected.clone(), caches[1], write, positions, rotation, None, scales)
    close(got, expected.contiguous())
    exact = dtype == torch.float32 and rotation is None  # otherwise the last bit before rounding may differ
    ours, theirs = (kv_gather(cache, torch.arange(pages, device=device)[:, None]) for cache in reversed(caches))
    if exact:
        assert torch.equal(caches[1].view(torch.uint8), caches[0].view(torch.uint8))
        assert torch.equal(kv_scales(caches[1]), kv_scales(caches[0]))
    else:
        step = 0.13 if kind == torch.float8_e4m3fn else 0.26  # what lies between two may go to either
        torch.testing.assert_close(ours, theirs, rtol=step, atol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_so_in_8_bits(broken, given, device):
    projected = numbers(2, 4 * 16, dtype=torch.float32, device=device)
    projected[1, 40] = broken
    cache = float8_cache(torch.zeros(3, 2, 1, 4, 16, device=device), torch.float8_e4m3fn)
    scales = torch.ones(2, 1, device=device) if given else None
    at = torch.tensor([4, 5], device=device)
    qkv.place_heads(projected, cache, at, at, None, None, scales)
    got = kv_gather(cache, torch.tensor([[1]], device=device))[:, 0, 0]
    assert got[0, 1].isnan().all() and got[:, 0].isfinite().all() and got[1].isfinite().all()
