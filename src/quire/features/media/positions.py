"""Rotary positions of prompts with images and videos, for models whose rotary positions have three axes (M-RoPE).

    text  t t t t          [ 0 1 2 3 ]
    grid  1 x 2 x 3        frame [ 4 4 4 4 4 4 ]   row [ 4 4 4 5 5 5 ]   column [ 4 5 6 4 5 6 ]
    text  t t              [ 7 8 ]

In `types/media.py`, `PromptPart` has the rules, and `decode_offset` has the positions after the prompt.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.types.media import MediaItem, prompt_parts

AXES = 3  # frame, row, column


def prompt_positions(items: Sequence[MediaItem], length: int) -> npt.NDArray[np.int32]:
    """Return the rotary positions of a prompt, [3, length]. items: by rising position"""
    positions = np.empty((AXES, length), np.int32)
    for part in prompt_parts(items, length):
        found = positions[:, part.start : part.start + part.tokens]
        if part.item is None or part.item.grid is None:
            found[:] = np.arange(part.first, part.first + part.tokens)
            continue
        _, rows, columns = part.item.grid
        axes = np.meshgrid(part.frames, np.arange(rows), np.arange(columns), indexing="ij")
        found[:] = np.stack(axes).reshape(AXES, -1) + part.first
    return positions
