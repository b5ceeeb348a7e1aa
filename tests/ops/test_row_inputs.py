"""The kernel that fills the inputs of rows, against the reference; and the reference against what it must be."""

import dataclasses

import pytest
import torch

from quire.ops.arguments import RowInputs
from quire.ops.rows import reference_fill_rows

pytest.importorskip("triton")
from quire.ops.kernels import rows as kernels

PAGE_SIZE, SLOTS, LENGTH, GROUPS = 4, 6, 39, 2
SLOT, END = [4, 0, 5, -1, -1], [39, 1, 9, 1, 1]
ONE_EACH, RAGGED = [0, 1, 2, 3, 4, 5], [0, 13, 14, 16, 19, 19]


def blank(starts, device) -> RowInputs:
    """Views of wider memory, with something in it."""
    count, tokens = len(SLOT), starts[-1]
    return RowInputs(
        ids=torch.full((tokens,), 7, device=device),
        positions=torch.full((tokens,), 7, device=device),
        kv_lengths=torch.full((count,), 7, dtype=torch.int32, device=device),
        tables=torch.full((GROUPS, count + 3, 12), 7, dtype=torch.int32, device=device)[:, :count],
        write=torch.full((GROUPS, tokens + 3), 7, device=device)[:, :tokens],
    )


def filled(fill, starts, device) -> dict[str, torch.Tensor]:
    tokens = torch.arange(SLOTS * (LENGTH + 1), dtype=torch.int32, device=device).view(SLOTS, -1)
    tables = 100 + torch.arange(GROUPS * SLOTS * 10, dtype=torch.int32, device=device).view(GROUPS, SLOTS, 10)
    out = blank(starts, device)
    slot, end = torch.tensor(SLOT, device=device), torch.tensor(END, device=device)
    fill(slot, end, torch.tensor(starts, dtype=torch.int32, device=device), tokens, tables, PAGE_SIZE, out)
    assert end.tolist() == END
    return {field.name: getattr(out, field.name).cpu() for field in dataclasses.fields(out)}


def test_the_reference():
    out = filled(reference_fill_rows, ONE_EACH, "cpu")
    assert out["ids"].tolist() == [4 * 40 + 38, 0, 5 * 40 + 8, 0, 0]
    assert out["positions"].tolist() == [38, 0, 8, 0, 0]
    assert out["kv_lengths"].tolist() == END
    assert out["write"].tolist() == [[149 * 4 + 2, 400, 152 * 4, 0, 0], [209 * 4 + 2, 640, 212 * 4, 0, 0]]
    assert out["tables"][1, 0].tolist() == [*range(200, 210), 7, 7]
    assert out["tables"][0, 2, :4].tolist() == [150, 151, 152, 7]
    assert out["tables"][:, 3:, 0].tolist() == [[0, 0], [0, 0]]


def test_the_reference_with_several_tokens_in_a_row():
    out = filled(reference_fill_rows, RAGGED, "cpu")
    assert out["positions"].tolist() == [*range(26, 39), 0, 7, 8, 0, 0, 0]
    assert out["ids"].tolist() == [*range(186, 199), 0, 207, 208, 0, 0, 0]
    assert out["write"][1, 13:].tolist() == [640, 211 * 4 + 3, 212 * 4, 0, 0, 0]
    assert out["write"][0, :4].tolist() == [146 * 4 + 2, 146 * 4 + 3, 147 * 4, 147 * 4 + 1]


@pytest.mark.parametrize("starts", [ONE_EACH, RAGGED], ids=["one each", "ragged"])
@pytest.mark.parametrize("block", [4, 512])
def test_the_kernel(device, monkeypatch, block, starts):
    monkeypatch.setattr(kernels, "BLOCK", block)
    expected = filled(reference_fill_rows, starts, "cpu")
    for fill, where in ((kernels.fill_rows, device), (reference_fill_rows, "cpu")):
        for name, got in filled(fill, starts, where).items():
            assert torch.equal(got, expected[name]), name
