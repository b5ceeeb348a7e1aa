"""Memory goes back: of large steps when small ones follow, and of code that is not run any more."""

import subprocess
import sys

import pytest

from quire.device.cpu import process_memory

MAPPED = """\
00400000-00452000 r-xp 00001000 08:02 173521      /usr/lib/libplain.so
Rss:                 328 kB
Anonymous:             0 kB
AnonHugePages:         0 kB
00500000-00552000 r-xp 00000000 08:02 173522      /usr/lib/libpatched.so
Anonymous:             4 kB
00600000-00602000 r--p 00000000 08:02 173521      /usr/lib/libplain.so
Anonymous:             0 kB
00700000-00702000 r-xp 00000000 00:00 0           [vdso]
Anonymous:             0 kB
00800000-00902000 r-xp 00000000 08:02 173523      /usr/lib/a name: with 0 kB.so
Anonymous:             0 kB
"""
IN_ANOTHER_PROCESS = """
import torch
from pathlib import Path
from quire.device.cpu.process_memory import release_code

def mapped():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
    return int(line.split()[1]) / 1024

before = mapped()
release_code()
left = mapped()
print(before, left, torch.ones(3).sum().item())
"""


def test_only_code_as_the_file_has_it_is_let_go_of():
    assert list(process_memory.find_code(MAPPED)) == [(0x400000, 0x452000), (0x800000, 0x902000)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say where code lies")
def test_the_process_goes_on_without_the_code_of_its_start():
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], capture_output=True, text=True, check=True)
    before, left, total = map(float, done.stdout.split())
    assert left < before / 2
    assert total == 3


def test_memory_goes_back_when_steps_become_small(monkeypatch):
    times = []
    monkeypatch.setattr(process_memory, "_trim", lambda: times.append(tide))
    tide = process_memory.AllocatorTrim()
    steps = [
        (1024, 0),
        (1024, 0),
        (512, 0),
        (16, 0),
        (16, 1),
        (16, 1),
        (1, 1),
        (95, 1),
        (1, 1),
        (1, 1),
        (100, 1),
        (1, 1),
        (1, 2),
    ]
    for tokens, expected in steps:
        tide.note(tokens)
        assert len(times) == expected
