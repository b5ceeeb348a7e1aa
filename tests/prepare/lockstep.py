"""All ranks of a divided model in one process."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from patience import PATIENCE
from quire.device.cuda.group import DeviceGroup
from quire.device.cuda.nccl import NCCL
from quire.device.cuda.one_shot import MAX_BYTES, OneShot
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


class PlayedNCCL(NCCL):
    """NCCL, as far as ranks call it: parts of all ranks must have one size."""

    def __init__(self, member):
        self._member, self._rank, self._size, self._ranks = member, member.rank, member.all.size, self
        self._aborting = None

    def alltoall_base(self, out, part, out_splits, splits):
        parts = self._member.exchange(("all-to-all", part.shape, part.dtype, *out_splits, *splits), part)
        return self._note("all-to-all", out, [each.view(self._size, -1)[self._rank] for each in parts])

    def _allgather_base(self, out, part):
        return self._note("all-gather", out, self._member.exchange(("all-gather", part.shape, part.dtype), part))

    def _note(self, call, out, parts):
        assert out.is_contiguous()
        out.copy_(torch.cat([part.view(-1) for part in parts]))
        self._member.all.calls[call] += 1
        return SimpleNamespace(wait=lambda: None)


class PlayedOneShot(OneShot):
    """One-shot collectives, without memory that ranks have mapped."""

    def __init__(self, member):
        self._member, self._rank, self._size = member, member.rank, member.all.size

    def _run(self, source, target):
        assert source.is_contiguous() and target.is_contiguous() and source.numel() * source.element_size() <= MAX_BYTES
        parts = self._member.exchange(("one-shot", source.shape, source.dtype, target.shape), source)
        if target.dim() == 1:
            target.copy_(parts[0])
            for part in parts[1:]:
                target += part
        else:
            target.copy_(torch.stack(parts))
        self._member.all.calls["one-shot"] += 1


class GPULockstep(Lockstep):
    """Ranks with a GPU each, whose collectives are checked."""

    def __init__(self, size):
        super().__init__(size)
        self.calls = Counter()

    def of(self, rank):
        member = super().of(rank)
        return DeviceGroup(Position(rank, self.size), None, PlayedOneShot(member), PlayedNCCL(member), True)


def divided(facts, size, expert_parallel=False, kind=Lockstep, **options):
    """The models of all ranks, and the group they are in."""
    group, models = kind(size), []
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
