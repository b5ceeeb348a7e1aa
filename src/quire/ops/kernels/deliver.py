"""Words to places all over the device's memory in one launch: a program takes one run of them.

The list of runs and the words may lie in the host's memory, if it is pinned: the device then fetches them itself, which takes
less time than a copy before the launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.launcher import launched


@launched
@triton.jit
def _deliver(
    runs,  # [runs, 4] int64: address, place of the first word, how many there are, and how many are written
    words,  # [.] int32
    BLOCK: tl.constexpr,
):
    run = runs + tl.program_id(0).to(tl.int64) * 4
    target = tl.load(run).to(tl.pointer_type(tl.int32))
    source = words + tl.load(run + 1)
    at = tl.arange(0, BLOCK)
    word = tl.load(source + at, mask=at < tl.load(run + 2), other=0)
    tl.store(target + at, word, mask=at < tl.load(run + 3))


def deliver(runs: Tensor, words: Tensor, count: int, most: int) -> None:
    """The first `count` of `runs`, none of which writes more than `most` words, a power of two, and no two to the same place.
    Where more words are written than there are, the others are 0."""
    _deliver[(count,)](runs, words, BLOCK=most, num_warps=8)
