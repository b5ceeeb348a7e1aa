"""Memory that is there becomes huge pages with the same content; memory that is not stays away."""

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.device.cpu import process_memory
from quire.device.cpu.process_memory import HUGE, PAGE, find_filled, gather, gather_in_background

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or mmap.PAGESIZE != PAGE, reason="pages of other sizes are left alone, and other systems"
)


def take(places: int) -> tuple[np.ndarray, int]:
    """Memory with so many whole places for huge pages, none of it there yet, and the address of the first place."""
    memory = np.frombuffer(mmap.mmap(-1, (places + 1) * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    before = -memory.ctypes.data % HUGE
    return memory[before : before + places * HUGE], memory.ctypes.data + before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_filled_places_are_found():
    memory, start = take(4)
    memory[:HUGE], memory[HUGE : 2 * HUGE : 2 * PAGE], memory[2 * HUGE], memory[3 * HUGE :] = 1, 2, 3, 4
    found = set(find_filled())
    assert [start + place * HUGE in found for place in range(4)] == [True, False, False, True]


def test_content_stays_and_nothing_grows():
    memory, _ = take(6)
    memory[: 4 * HUGE] = np.random.default_rng(0).integers(0, 256, 4 * HUGE, np.uint8)
    memory[4 * HUGE :: 8 * PAGE] = 7
    expected, before = memory[: 4 * HUGE].copy(), resident()
    gather()
    assert resident() < before + 32 * PAGE * len(find_filled()) + HUGE
    assert np.array_equal(memory[: 4 * HUGE], expected) and (memory[4 * HUGE :: 8 * PAGE] == 7).all()
    assert not memory[4 * HUGE + 1 :: 8 * PAGE].any()


@pytest.mark.parametrize(
    ("nbytes", "setting", "size", "started"),
    [
        (1 << 30, "always [madvise] never", HUGE, True),
        (1 << 30, "always madvise [never]", HUGE, False),
        (1 << 30, "[always] madvise never", 1 << 29, False),
        (1 << 20, "[always] madvise never", HUGE, False),
    ],
)
def test_when_it_is_done(nbytes, setting, size, started, tmp_path, monkeypatch):
    (tmp_path / "enabled").write_text(setting)
    (tmp_path / "hpage_pmd_size").write_text(f"{size}\n")
    calls = []
    monkeypatch.setattr(process_memory.Thread, "start", lambda thread: calls.append(thread.name))
    for settings in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(process_memory, "SETTINGS", settings)
        gather_in_background(nbytes)
    assert len(calls) == started
