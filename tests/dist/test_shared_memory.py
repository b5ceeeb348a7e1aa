"""Ranks that meet in shared memory, here in threads of one process: sums in the order of ranks, whoever is late."""

import itertools
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.dist import shared_memory
from quire.dist.mesh import Position, evenly, largest_share, share_layers
from quire.dist.shared_memory import SharedMemoryGroup
from quire.proc.spawn import anonymous_memory
from quire.types.cache import LayerCache


class Told(Exception):
    pass


class Watch:
    def lost(self, rank):
        raise Told(f"lost {rank}")

    def late(self, ranks, seconds):
        raise Told(f"late {ranks}")


class Ranks:
    def __init__(self, size):
        self.size, self.memory = size, anonymous_memory("test")
        self.ends = [{} for _ in range(size)]
        for first, second in itertools.combinations(range(size), 2):
            self.ends[first][second], self.ends[second][first] = socket.socketpair()
        self.groups = [SharedMemoryGroup(Position(r, size), self.memory, self.ends[r], Watch()) for r in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def run(self, work):
        """work(group, rank) of every rank at the same time; all get the same, which is returned."""

        def late(rank):
            time.sleep(random.random() / 500)
            return work(self.groups[rank], rank)

        first, *others = self.pool.map(late, range(self.size))
        assert all(torch.equal(first, other) for other in others)
        return first

    def close(self):
        self.pool.shutdown()
        os.close(self.memory)
        for end in itertools.chain.from_iterable(ends.values() for ends in self.ends):
            end.close()


def test_what_ranks_say():
    ranks = Ranks(3)
    try:
        heard = list(ranks.pool.map(lambda rank: ranks.groups[rank].all_gather_bytes(b"x" * rank * 300), range(3)))
        assert heard == [[b"", b"x" * 300, b"x" * 600]] * 3
        with pytest.raises(ValueError, match="1021 bytes exceed the limit"):
            ranks.groups[0].all_gather_bytes(b"x" * 1021)
    finally:
        ranks.close()


@pytest.fixture(params=[2, 3, 5])
def ranks(request):
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("piece", [64, shared_memory.CHUNK_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_the_order_of_ranks_and_joined_parts_beside_each_other(ranks, piece, dtype, monkeypatch):
    """In one piece and in many, turn after turn."""
    monkeypatch.setattr(shared_memory, "CHUNK_BYTES", piece)
    made = Ranks(ranks.size)
    for turn in range(6):
        generator = torch.Generator().manual_seed(turn)
        parts = [torch.randn(3 + turn, 7, generator=generator).to(dtype) for _ in range(made.size)]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        assert torch.equal(made.run(lambda group, rank: group.add(parts[rank])), expected)  # noqa: B023
        total = 41
        whole = torch.randn(turn, total, generator=generator).to(dtype)
        cuts = [evenly(total)(Position(rank, made.size)) for rank in range(made.size)]
        joined = made.run(lambda group, rank: group.join(whole[:, cuts[rank].start : cuts[rank].stop], total))  # noqa: B023
        assert torch.equal(joined, whole)
    made.close()


def test_a_rank_that_goes_or_is_late_is_told(monkeypatch):
    monkeypatch.setattr(shared_memory, "POLL_S", 0.01)
    made = Ranks(3)
    with made.pool:
        waiting = [made.pool.submit(made.groups[rank].add, torch.ones(2)) for rank in (0, 1)]
        assert "late [2]" in {str(one.exception()) for one in waiting}
    made.close()
    made = Ranks(2)
    made.ends[1][0].close()
    with pytest.raises(Told, match="lost 1"):
        made.groups[0].add(torch.ones(2))
    made.close()


def test_the_largest_share_of_a_cache_is_a_ranks():
    layers = [LayerCache(5, 16, window) for window in (None, 8)]
    for size in range(1, 9):
        shares = [share_layers(layers, Position(rank, size)) for rank in range(size)]
        assert max(share[0].kv_heads for share in shares) == largest_share(layers, size)[0].kv_heads
        assert all(layer.window == whole.window for share in shares for layer, whole in zip(share, layers, strict=True))
