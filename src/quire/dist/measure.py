"""Measure the collectives of ranks: time by message size, and whether the bits are right."""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.dist.collectives import Group
from quire.dist.mesh import Position, evenly

DTYPE = torch.bfloat16
WARM_UP = 3
RECORDED = 16  # collectives in one recording
MEASURED_BYTES = 1 << 26  # per message size, within the limits below
MIN_REPEATS, MAX_REPEATS = 8, 200
Measured = dict[str, str | float | bool]  # travels between ranks


def measure(
    group: Group,
    position: Position,
    device: torch.device,
    synchronize: Callable[[], None],
    sizes: Sequence[int],
    record: Callable[[Callable[[], None]], Callable[[], object]] | None = None,
) -> list[Measured]:
    """Run all collectives with messages of these sizes in bytes. All ranks call this at the same time.

    record: records what a function launches and returns what replays it, if steps are recorded with their collectives.

    A result is right if it has the bits of the same calculation in this process, and `digest` must be the same on all ranks.
    """
    found: list[Measured] = []
    for size in sizes:
        length = max(position.size, size // DTYPE.itemsize)
        parts = [_values(length, rank) for rank in range(position.size)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        own, cut = parts[position.rank].to(device), evenly(length)(position)
        whole = parts[0].view(1, length)
        share = whole[:, cut.start : cut.stop].contiguous().to(device)
        runs: list[tuple[str, Callable[[], Tensor], Tensor]] = [
            ("all-reduce", partial(group.add, own), total),
            ("all-gather", partial(group.join, share, length), whole),
        ]
        for name, run, expected in runs:
            result = run().cpu()
            repeats = min(MAX_REPEATS, max(MIN_REPEATS, MEASURED_BYTES // size))
            if record is None:
                seconds = _seconds(run, synchronize, repeats)
            else:
                replay = record(partial(_repeat, run))
                seconds = _seconds(replay, synchronize, max(2, repeats // RECORDED)) / RECORDED
            found.append(
                {"collective": name, "bytes": size, "microseconds": 1e6 * seconds, "right": torch.equal(result, expected),
                 "digest": _digest(result)}
            )  # fmt: skip
    return found


def _values(length: int, rank: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(DTYPE)


def _repeat(run: Callable[[], Tensor]) -> None:
    for _ in range(RECORDED):
        run()


def _seconds(run: Callable[[], object], synchronize: Callable[[], None], repeats: int) -> float:
    for _ in range(WARM_UP):
        run()
    synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - began) / repeats


def _digest(result: Tensor) -> str:
    return hashlib.sha256(result.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
