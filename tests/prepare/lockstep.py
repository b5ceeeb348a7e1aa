"""All ranks of a divided model in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from patience import PATIENCE
from quire.dist.mesh import Position
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.prepare.shard import shard

TURN = threading.Lock()  # one rank runs at a time: what it shares with others of its process is not meant for threads


class Lockstep:
    """What ranks in threads of one process say to each other: each waits until all have laid down their parts."""

    def __init__(self, size):
        self.size, self.parts, self.barrier = size, [None] * size, threading.Barrier(size, timeout=PATIENCE)
        self.sums = 0

    def of(self, rank):
        return Member(self, rank)


class Member:
    def __init__(self, all_ranks, rank):
        self.all, self.rank = all_ranks, rank

    def exchange(self, call, part):
        """Return all ranks' parts. The ranks must make the same calls in the same order, with parts of the same kind."""
        self.all.parts[self.rank] = call, part.clone()  # whoever laid it down may write over it when the others have it
        self.wait()
        calls, parts = zip(*self.all.parts, strict=True)
        self.wait()
        assert set(calls) == {call}, f"ranks make different calls: {calls}"
        return parts

    def wait(self):
        TURN.release()
        try:
            self.all.barrier.wait()
        finally:
            TURN.acquire()

    def add(self, part):
        first, *others = self.exchange(("add", part.shape, part.dtype), part)
        self.all.sums += self.rank == 0
        total = first.clone()
        for other in others:
            total += other
        return total

    def join(self, part, total):
        out = torch.cat(self.exchange(("join", part.shape[:-1], part.dtype, total), part), dim=-1)
        assert out.shape[-1] == total
        return out


def divided(facts, size, expert_parallel=False, **options):
    """The models of all ranks, and the group they are in."""
    group, models = Lockstep(size), []
    for rank in range(size):
        model = build_model(facts)
        shard(model, Position(rank, size, expert_parallel), group.of(rank))
        load_weights(model, facts, **{"device": "cpu", "dtype": "float32"} | options)
        models.append(model)
    return models, group


def together(models, run):
    """run(model) of every rank; they all get the same bits, and those are returned."""

    def in_turn(model):
        with TURN:
            return run(model)

    with ThreadPoolExecutor(len(models)) as pool:
        first, *others = pool.map(in_turn, models)
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))
    return first
