"""Engines that share experts, here threads of one process: each comes to its layers when it does, and all are served."""

import itertools
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from patience import PATIENCE
from quire.features.experts.exchange import ExpertsGroup, SharedExperts
from quire.dist.mesh import Position
from quire.proc.spawn import anonymous_memory
from quire.types.errors import ExpertPeerLost, EngineDead

WIDTH, EXPERTS, LAYERS = 6, 7, 3


class Watch:
    def lost(self, rank):
        raise ExpertPeerLost(f"lost {rank}")

    def late(self, ranks, seconds):
        pass


class Small(ExpertsGroup):
    chunk_bytes = 1 << 12


def scale(layer, expert):
    return float(2 ** (expert - layer))  # sums of whole numbers times these are exact


class Fleet:
    def __init__(self, engines, ranks):
        self.size, self.memory = engines * ranks, anonymous_memory("test")
        ends = [{} for _ in range(self.size)]
        for first, second in itertools.combinations(range(self.size), 2):
            ends[first][second], ends[second][first] = socket.socketpair()
        self.shared = []
        for rank in range(self.size):
            position = Position(rank, self.size)
            group = Small(position, self.memory, ends[rank], Watch())
            self.shared.append(SharedExperts(group, position, ranks, torch.float32))
            self.shared[-1].serve([(WIDTH, self.runs(rank, layer)) for layer in range(LAYERS)])
        self.leaders = [one for one in self.shared if one.leads]

    def runs(self, rank, layer):
        def run(x, weights, experts):
            out = torch.zeros_like(x)
            for expert in range(rank, EXPERTS, self.size):  # a rank's own
                share = (weights * (experts == expert)).sum(-1, keepdim=True)
                out += share * scale(layer, expert) * x
            return out

        return run

    def close(self):
        for one in self.shared:
            one.close()
        os.close(self.memory)


@pytest.fixture
def fleet(request):
    made = Fleet(*request.param)
    yield made
    made.close()


def work(leader, seed):
    """Steps of any length, some with layers left out or twice, with pauses: whatever is asked comes out."""
    chance = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(chance.choice([0, 5, 12])):
        rows = chance.choice([0, 1, 3, 200])  # the last in several turns
        for layer in sorted(chance.choices(range(LAYERS), k=4)):
            x = torch.randint(-9, 9, (rows, WIDTH), generator=numbers).float()
            experts = torch.stack([torch.randperm(EXPERTS, generator=numbers)[:2] for _ in range(rows)] or [torch.zeros(2)])[:rows]
            weights = torch.full((rows, 2), 0.5)
            found = leader.run(layer, x, weights, experts)
            expected = x * 0.5 * (2.0 ** (experts - layer)).sum(-1, keepdim=True)
            assert torch.equal(found, expected)
        if chance.random() < 0.3:
            time.sleep(0.002)
    return True


@pytest.mark.parametrize("fleet", [(2, 1), (3, 1), (2, 2)], indirect=True)
def test_engines_are_served_wherever_they_are(fleet):
    with ThreadPoolExecutor(len(fleet.leaders)) as pool:
        assert all(pool.map(lambda leader: leader.wait_all() is None, fleet.leaders))
        for seed in range(2):
            assert all(pool.map(work, fleet.leaders, [10 * seed + i for i in range(len(fleet.leaders))]))


@pytest.mark.parametrize("fleet", [(3, 1)], indirect=True)
def test_one_that_fails_is_noticed_by_all(fleet):
    fleet.shared[1]._layers = [(WIDTH, lambda *_: 1 / 0)] * LAYERS
    row = torch.ones(1, WIDTH), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ExpertPeerLost, match="lost [12]"):
        fleet.leaders[0].run(0, *row)
    for one in fleet.shared:
        one._thread.join(PATIENCE)
        with pytest.raises(EngineDead, match="lost|ZeroDivisionError"):
            one.check()
        with pytest.raises(EngineDead):
            one.run(0, *row)
