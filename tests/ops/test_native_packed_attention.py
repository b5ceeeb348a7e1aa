"""The C kernel of attention over packed sequences: torch's values, and the same bits in any batch."""

import numpy as np
import pytest
import torch

from quire.ops import native
from quire.ops.arguments import Rotation
from quire.ops.native_packed_attention import PackedAttention, supports
from quire.ops.packed_attention import reference_attend_packed
from quire.ops.qkv import turn

pytestmark = pytest.mark.skipif(not native.encodes(), reason="needs Quire's C kernels")
LENGTHS = [7, 300, 1, 129, 16, 0, 40]


def run(qkv, lengths, heads, head_dim, keys=None, **options):
    out = torch.full((len(qkv), heads * head_dim), float("nan"))
    PackedAttention(qkv.flatten(1), out, head_dim, scale=head_dim**-0.5, **options).run(
        np.cumsum([0, *lengths], dtype=np.int32), np.array(lengths if keys is None else keys, np.int32)
    )
    return out


def expected(qkv, lengths, head_dim, rotation=None, keys=None, **options):
    q, k, v = qkv.clone().chunk(3, dim=1)
    positions = torch.cat([torch.arange(count) for count in lengths])
    for x in (q, k) if rotation is not None else ():
        turn(x, *rotation.rows(positions))
    starts = np.cumsum([0, *lengths]).tolist()
    rows = tuple(zip(starts, lengths, lengths if keys is None else keys, strict=False))
    return reference_attend_packed(q, k, v, rows, {}, scale=head_dim**-0.5, **options).flatten(1)


def make_rotation(size):
    angles = torch.rand(512, size, generator=torch.Generator().manual_seed(3)) * 6
    return Rotation(angles.cos(), angles.sin())


@pytest.mark.parametrize("head_dim", [8, 32, 64, 20])
@pytest.mark.parametrize("kind", ["plain", "window", "bias", "rope"])
def test_values_are_those_of_torch_and_the_same_in_any_batch(head_dim, kind):
    heads = 3
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(sum(LENGTHS), 3 * heads, head_dim, generator=generator) * 2
    options = {
        "plain": {},
        "window": {"window": 9},
        "bias": {"bias": torch.randn(heads, 2 * 511 + 1, generator=generator)},
        "rope": {"rotation": make_rotation(head_dim // 4)},
    }[kind]
    assert supports(head_dim, options.get("rotation"))
    found = run(qkv, LENGTHS, heads, head_dim, **options)
    torch.testing.assert_close(found, expected(qkv, LENGTHS, head_dim, **options), rtol=1e-5, atol=1e-5)
    for mine, part in zip(torch.split(found, LENGTHS), torch.split(qkv, LENGTHS), strict=True):
        alone = run(part.contiguous(), [len(part)], heads, head_dim, **options)
        assert torch.equal(alone, mine)


@pytest.mark.parametrize("window", [None, 9])
def test_queries_see_no_token_beyond_the_keys(window):
    lengths, keys, heads = [40, 300, 9], [25, 130, 9], 2
    qkv = torch.randn(sum(lengths), 3 * heads, 16, generator=torch.Generator().manual_seed(2))
    found = run(qkv, lengths, heads, 16, keys, window=window)
    torch.testing.assert_close(found, expected(qkv, lengths, 16, keys=keys, window=window), rtol=1e-5, atol=1e-5)


def test_values_that_are_not_numbers_reach_the_result_of_their_sequence_only():
    qkv = torch.randn(24, 6, 16)
    qkv[3] = float("nan")
    found = run(qkv, [8, 16], 2, 16)
    assert found[:8].isnan().all() and not found[8:].isnan().any()
