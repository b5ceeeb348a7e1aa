"""Drawing the next token of each row on a GPU: parameters by slot, tokens and faults out.

What it computes is written down in `runner/sampler`, whose stages are the way on a CPU and the oracle of the tests; the random
integers are the same, so both draw the same tokens but for rounding. This file knows no stages and no requests.
"""

from torch import Tensor

from quire.ops.arguments import DrawColumns, DrawScratch


def draw(
    logits: Tensor,
    drawer: Tensor,
    end: Tensor,
    columns: DrawColumns,
    tokens: Tensor,
    scratch: DrawScratch,
    fault: Tensor | None = None,
) -> Tensor:
    """logits [N, V] float32, drawer and end [N] int64 -> ids and faults [2, >= N] int32, good until the next draw.

    Row i draws for slot drawer[i], into tokens [S, L] int32 at end[i]; where the drawer is -1 nothing is done. `fault` [N]
    int32 is what was wrong with the logits before they were edited; None = they were not.
    """
    from quire.ops.kernels import sample

    sample.draw(logits, drawer, end, columns, tokens, scratch, fault)
    return scratch.out
