"""Records in host memory, and the copies between them and pages: on a CPU, and on a GPU next to work on the step's stream."""

import numpy as np
import pytest
import torch

from quire.cache.layout import make_layout
from quire.features.tiers import records
from quire.features.tiers.records import Arena, Moved, RecordContent
from quire.features.tiers.states import StateMemory
from quire.runner.core import KVBuffers
from quire.types.cache import KVLayout, LayerCache

PAGES, LAYERS = 30, [LayerCache(2, 8)] * 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STORED, FETCHED = np.arange(1, 13, dtype=np.int32), np.arange(13, 25, dtype=np.int32)
RECORDS = np.array([7, 8, 9, 2, 11, 0, 1, 5, 4, 3, 10, 6], np.int32)  # some follow each other
TAGS = np.arange(12, dtype=np.int64) * 7919


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


def make(
    device: torch.device, layout: KVLayout = KVLayout.PAGES, whole: bool = True, count: int = 14
) -> tuple[Arena, KVBuffers]:
    """Return records of random pages. whole: a page is contiguous memory over all layers."""

    def allocate(pages: int, size: int) -> torch.Tensor:
        return torch.randint(0, 256, (pages, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)).to(device)

    kv = KVBuffers(make_layout(LAYERS, 4, 4), LAYERS, PAGES, torch.float32, allocate, layout, whole)
    return Arena(RecordContent([kv], StateMemory([]), 1), count, 2, device), kv


def content(kv: KVBuffers, pages: np.ndarray) -> torch.Tensor:
    """Return [pages, layers, values] of all layers."""
    return torch.stack([view[torch.from_numpy(pages).long()].flatten(1) for _, view, _ in kv.views()], 1).view(torch.int32)


def overwrite(kv: KVBuffers, pages: np.ndarray) -> None:
    for _, view, _ in kv.views():
        view[torch.from_numpy(pages).long().to(view.device)] = 0.0


def ended(moved: list[Moved]) -> dict[int, bool]:
    for each in moved:
        each.end.wait()
    return {page: right for each in moved for page, right in zip(each.pages, each.right.tolist(), strict=True)}


@pytest.mark.parametrize(
    ("layout", "whole"), [(KVLayout.PAGES, True), (KVLayout.PAGES, False), (KVLayout.LINES, True), (KVLayout.SPLIT, True)]
)
def test_more_pages_than_the_buffers_hold_come_back(monkeypatch, device: torch.device, layout: KVLayout, whole: bool):
    monkeypatch.setattr(records, "STAGED_BYTES", 3 * 3 * 2 * 2 * 4 * 8 * 4)  # three pages
    arena, kv = make(device, layout, whole)
    before = content(kv, STORED)
    arena.store(STORED, RECORDS, TAGS)
    overwrite(kv, STORED)  # as rows of the step do
    assert ended(arena.fetch(RECORDS, FETCHED, TAGS)) == dict.fromkeys(FETCHED.tolist(), True)
    assert torch.equal(content(kv, FETCHED), before) and not torch.equal(content(kv, STORED), before)
    arena.close()


def test_a_record_of_other_content_or_of_another_key_is_wrong(device: torch.device):
    arena, _ = make(device)
    arena.store(STORED, RECORDS, TAGS)
    arena.wait()
    arena.memory[RECORDS[3], 5] ^= 1
    arena.sums[RECORDS[4], 1] ^= 1
    other = TAGS.copy()
    other[5] += 1
    right = ended(arena.fetch(RECORDS, FETCHED, other))
    assert [page for page in right if not right[page]] == FETCHED[3:6].tolist()
    arena.close()


def test_runs_of_records_are_copied_together():
    assert records.runs(RECORDS) == [
        (0, 7, 3),
        (3, 2, 1),
        (4, 11, 1),
        (5, 0, 2),
        (7, 5, 1),
        (8, 4, 1),
        (9, 3, 1),
        (10, 10, 1),
        (11, 6, 1),
    ]
    assert records.runs(np.array([4], np.int32)) == [(0, 4, 1)]


@pytest.mark.gpu
def test_the_host_does_not_wait_for_copies_and_they_wait_for_launched_steps():
    device = torch.device("cuda")
    arena, kv = make(device)
    arena.store(STORED, RECORDS, TAGS)
    arena.fetch(RECORDS, FETCHED, TAGS)  # compiles and allocates
    torch.cuda.synchronize()
    overwrite(kv, FETCHED)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10**8)  # a step that runs
        read = kv.raw[0].clone()  # and reads pages
        moved = arena.fetch(RECORDS, FETCHED, TAGS)
        arena.store(STORED, RECORDS, TAGS)
        assert not moved[-1].end.reached
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(ended(moved).values())
    torch.cuda.synchronize()
    assert not read[13:25].any(), "the step saw pages that were fetched after it"
    assert torch.equal(content(kv, FETCHED), content(kv, STORED))
    arena.close()


@pytest.mark.gpu
def test_memory_is_pinned_while_the_records_are_used():
    arena, _ = make(torch.device("cuda"), count=1000)
    assert arena.memory.is_pinned()
    memory = arena.memory
    arena.close()
    assert not memory.is_pinned()
