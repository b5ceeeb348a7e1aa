"""The kernel that fills the inputs of one-token rows, against the reference; and the reference against what it must be."""

import dataclasses

import pytest
import torch

from quire.ops.rows import RowInputs, reference_fill_rows

pytest.importorskip("triton")
from quire.ops.kernels import rows as kernels

PAGE_SIZE, SLOTS, LENGTH, GROUPS = 4, 6, 39, 2
SLOT, END = [4, 0, 5, -1, -1], [39, 1, 9, 1, 1]


def blank(device) -> RowInputs:
    """Views of wider memory, with something in it."""
    count = len(SLOT)
    return RowInputs(
        ids=torch.full((count,), 7, device=device),
        positions=torch.full((count,), 7, device=device),
        kv_lengths=torch.full((count,), 7, dtype=torch.int32, device=device),
        tables=torch.full((GROUPS, count + 3, 12), 7, dtype=torch.int32, device=device)[:, :count],
        write=torch.full((GROUPS, count + 3), 7, device=device)[:, :count],
    )


def filled(fill, device) -> dict[str, torch.Tensor]:
    tokens = torch.arange(SLOTS * (LENGTH + 1), dtype=torch.int32, device=device).view(SLOTS, -1)
    tables = 100 + torch.arange(GROUPS * SLOTS * 10, dtype=torch.int32, device=device).view(GROUPS, SLOTS, 10)
    out = blank(device)
    fill(torch.tensor(SLOT, device=device), torch.tensor(END, device=device), tokens, tables, PAGE_SIZE, out)
    return {field.name: getattr(out, field.name).cpu() for field in dataclasses.fields(out)}


def test_the_reference():
    out = filled(reference_fill_rows, "cpu")
    assert out["ids"].tolist() == [4 * 40 + 38, 0, 5 * 40 + 8, 0, 0]
    assert out["positions"].tolist() == [38, 0, 8, 0, 0]
    assert out["kv_lengths"].tolist() == END
    assert out["write"].tolist() == [[149 * 4 + 2, 400, 152 * 4, 0, 0], [209 * 4 + 2, 640, 212 * 4, 0, 0]]
    assert out["tables"][1, 0].tolist() == [*range(200, 210), 7, 7]
    assert out["tables"][0, 2, :4].tolist() == [150, 151, 152, 7]
    assert out["tables"][:, 3:, 0].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("block", [4, 512])
def test_the_kernel(device, monkeypatch, block):
    monkeypatch.setattr(kernels, "BLOCK", block)
    expected = filled(reference_fill_rows, "cpu")
    for name, got in filled(kernels.fill_rows, device).items():
        assert torch.equal(got, expected[name]), name
