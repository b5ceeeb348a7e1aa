"""Kernels that start while the one before them still runs (programmatic dependent launch), so that its end is not idle time.

A kernel launched with `**overlapping()` must call `wait_for_previous` before it reads what earlier kernels wrote, and before it
writes anything: every program of it, on every path. Weights it may read before, since nobody has written them for a long time;
who writes weights lets the device finish. `let_next_start` allows the next kernel to take the room that is free on the device;
without it the next begins when all programs have ended.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def ask_for(matrix, begin, end, STEP: tl.constexpr, MOST: tl.constexpr):
    """Blocks begin ... end of rows, matrix [N, 1] pointers, are brought near, and not waited for."""
    at = tl.minimum(begin + tl.arange(0, MOST), end - 1)
    places = matrix + at[None, :] * STEP
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def overlapping() -> dict[str, bool]:
    """How to launch such a kernel: Hopper and later can, older devices and the interpreter run it as any other."""
    early = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
