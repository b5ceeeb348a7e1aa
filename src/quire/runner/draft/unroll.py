"""A row with drafts as rows of one token each, one behind the other.

    row        slot 3, [ newest  draft 1  draft 2 ] up to position 9
    unrolled   slot 3 up to 7      slot 3 up to 8      slot 3 up to 9

Where all keys of a layer are written before any are read, that is the same, and it is what decoding steps are made of: recorded
graphs of so many rows run it, each row is cut as it is without drafts, and rows of one slot read its pages together. Tokens and
draws are the same ones, in the same order.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from quire.types.plan import Ints, Longs, Outputs, RowShapes, StepRows


class Unrolled(NamedTuple):
    shapes: RowShapes
    owner: Longs  # [rows] the row that each is of
    before: Ints  # [rows] so many tokens before the end of that one it ends


def unroll(rows: StepRows) -> tuple[StepRows, Longs]:
    """And the row of those given that each is of."""
    shapes, owner, before = unroll_shapes(rows.shapes)
    return StepRows(unroll_slots(rows.slot.tobytes(), rows.shapes), rows.end[owner] - before, shapes), owner


@lru_cache(16)  # the same array for steps of the same rows, so that it is seen that they are
def unroll_slots(slot: bytes, shapes: RowShapes) -> Ints:
    slots: Ints = np.frombuffer(slot, np.int32)[unroll_shapes(shapes).owner]
    return slots


@lru_cache(16)  # the device waits for this, and most steps are like the one before
def unroll_shapes(shapes: RowShapes) -> Unrolled:
    pieces = 1 + shapes.drafts  # what is known, and each draft
    owner = np.arange(len(pieces)).repeat(pieces)
    behind = pieces.cumsum(dtype=np.int32)
    place = np.arange(len(owner), dtype=np.int32) - (behind - pieces)[owner]
    count = np.where(place == 0, (shapes.count - shapes.drafts)[owner], 1).astype(np.int32)
    draw = Outputs.last(count, shapes.sample[owner].astype(np.int32)).draw
    outputs = Outputs(draw, shapes.outputs.prompt_logprobs, shapes.outputs.pool)
    return Unrolled(RowShapes(count, np.zeros_like(count), outputs), owner, shapes.drafts[owner] - place)
