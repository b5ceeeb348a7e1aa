"""Penalties in one launch: a program takes a row, counts its tokens, and takes each count back as it applies it."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import FARTHEST, Factors
from quire.ops.kernels.launcher import launched

BLOCK = 1024
SAID: tl.constexpr = tl.constexpr(1 << 30)  # a bit for the prompt's tokens; those of the output are counted below it


@launched
@triton.jit(do_not_specialize=["token_stride"])
def _penalize(
    logits,  # [N, V] float32
    rows,  # [n] int64
    slots,  # [n] int64
    ends,  # [n] int64
    prompts,  # [n] int64
    tokens,  # [S, L] int32
    repetitions,  # [S] float32
    frequencies,  # [S] float32
    presences,  # [S] float32
    counts,  # [m, V] int32 zeros
    logit_stride,
    token_stride,
    count_stride,
    FARTHEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    slot, end, prompt = tl.load(slots + place), tl.load(ends + place), tl.load(prompts + place)
    said = tokens + slot * token_stride
    mine = counts + place * count_stride
    x = logits + tl.load(rows + place) * logit_stride
    repetition, frequency, presence = tl.load(repetitions + slot), tl.load(frequencies + slot), tl.load(presences + slot)
    for begin in tl.range(0, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(said + at, mask=at < end, other=0)
        tl.atomic_or(mine + token, SAID, mask=at < prompt, sem="relaxed")
        tl.atomic_add(mine + token, 1, mask=(at >= prompt) & (at < end), sem="relaxed")
    tl.debug_barrier()
    for begin in tl.range(0, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(said + at, mask=at < end, other=0)
        taken = tl.atomic_xchg(mine + token, 0, mask=at < end, sem="relaxed")
        first = (at < end) & (taken != 0)
        count = (taken & (SAID - 1)).to(tl.float32)
        before = tl.load(x + token, mask=first, other=0.0)
        value = tl.where(before > 0, tl.div_rn(before, repetition), before * repetition)
        value = value - frequency * count - tl.where(count > 0, presence, 0.0)
        value = tl.minimum(tl.maximum(value, -FARTHEST), FARTHEST)
        tl.store(x + token, tl.where(before > float("-inf"), value, before), mask=first)


def penalize(
    logits: Tensor, row: Tensor, slot: Tensor, end: Tensor, prompt: Tensor, tokens: Tensor, factors: Factors, counts: Tensor
) -> None:
    _penalize[(len(row),)](
        logits, row, slot, end, prompt, tokens, *factors, counts,
        logits.stride(0), tokens.stride(0), counts.stride(0), FARTHEST=FARTHEST, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
