"""What collectives take of a GPU: in a plan, and in the memory that an engine measures."""

from types import SimpleNamespace

import pytest
import torch

from quire.device.cuda import capture
from quire.device.cuda.collective_memory import CONNECTION_BYTES, ONE_SHOT_BYTES, collective_bytes
from quire.device.cuda.one_shot import OneShot
from quire.dist.mesh import Position
from quire.sim.links import LINKS


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_plan_counts_the_memory_of_one_shot_collectives(ranks):
    taken = []

    class Links:
        def share(self, size):
            taken.append(size)
            raise RuntimeError("no memory")

    OneShot(Position(0, ranks), Links()).open(lambda message: [message] * ranks)
    assert taken == [ONE_SHOT_BYTES]


def test_a_plan_counts_the_connections_of_nccl():
    nvlink = collective_bytes(8, 1, "nvlink4")
    assert nvlink == collective_bytes(8, 1, None) == (7 * 32 + 32) * CONNECTION_BYTES + ONE_SHOT_BYTES
    assert collective_bytes(8, 1, "pcie5") == (7 * 2 + 2) * CONNECTION_BYTES + ONE_SHOT_BYTES
    assert collective_bytes(16, 2, "nvlink4") == (15 * 2 + 32) * CONNECTION_BYTES
    assert [collective_bytes(1, 1, link) for link in LINKS] == [0] * len(LINKS)


def test_the_measured_budget_is_without_what_collectives_take(monkeypatch):
    """They are allocated outside torch, before memory is measured or in the largest step."""
    total, taken = 80 << 30, {"before": 0, "step": 0}
    cuda = SimpleNamespace(
        memory_allocated=lambda device: 10 << 30,
        memory_reserved=lambda device: 10 << 30,
        max_memory_allocated=lambda device: 12 << 30,
        mem_get_info=lambda device: (total - (10 << 30) - sum(taken.values()), total),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "synchronize"), lambda *device: None),
    )
    monkeypatch.setattr(capture.torch, "cuda", cuda)

    def budget(**more):
        taken.update(before=0, step=0)
        taken["before"] = more.get("before", 0)
        return capture.device_budget(torch.device("cpu"), 0.9, lambda: taken.update(step=more.get("step", 0)), 1 << 30)

    alone = budget()
    assert alone == int(0.9 * total) - (12 << 30) - (1 << 30)
    assert alone - budget(before=3 << 30) == 3 << 30
    assert alone - budget(before=2 << 30, step=1 << 30) == 3 << 30
