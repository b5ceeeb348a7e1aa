"""Rotary positions with three axes equal those of transformers, in every mixture of texts, images and videos."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.features.media.positions import prompt_positions
from quire.types.media import MediaItem, decode_offset, highest_position

MERGE, RATE = 2, 3  # patches along each side of an embedding; tokens per second
VISION = {"patch_size": 4, "spatial_merge_size": MERGE, "num_heads": 2, "depth": 1}
FAMILIES = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5")


@cache
def model_of(name):
    """Return a model without weights: `get_rope_index` reads its configuration only."""
    import transformers

    more = {"tokens_per_second": RATE} if name == "Qwen2_5_VL" else {}
    kind = getattr(transformers, f"{name}Model")
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = getattr(transformers, f"{name}Config")(vision_config={**VISION, **more})
    return model


sides = st.integers(1, 6)
pictures = st.tuples(st.just("image"), st.just(1), sides, sides, st.just(1.0))
clips = st.tuples(
    st.just("video"),
    st.integers(1, 7),
    sides,
    sides,
    st.sampled_from([float(np.float32(second)) for second in (0.1, 0.4, 1, 1.37, 5.3)]),
)
parts = st.lists(st.tuples(st.integers(1, 9), st.one_of(pictures, clips)), max_size=4)


def layout(name, parts, rest):
    """Return items, token types (0 text, 1 image, 2 video) and the arguments of transformers."""
    kinds, items, grids, seconds = [], [], {"image": [], "video": []}, []
    for text, (modality, frames, rows, columns, second) in parts:
        kinds += [0] * text
        start, kind = len(kinds), 1 + (modality == "video")
        if name in ("Qwen3VL", "Qwen3_5") and modality == "video":
            embedded = []
            for _ in range(frames):
                kinds += [0, 0]
                embedded.append((len(kinds) - start, rows * columns))
                kinds += [kind] * (rows * columns)
            kinds += [0]
        else:
            embedded = [(1, frames * rows * columns)]
            kinds += [0, *[kind] * (frames * rows * columns), 0]
        interval = float(np.float32(second) * RATE) if name == "Qwen2_5_VL" and modality == "video" else 1.0
        grid = (frames, rows, columns)
        items.append(MediaItem(modality, start, len(kinds) - start, "", (), tuple(embedded), grid, interval))
        grids[modality].append([frames, rows * MERGE, columns * MERGE])
        seconds += [second] if modality == "video" else []
    more = {f"{each}_grid_thw": torch.tensor(found) for each, found in grids.items() if found}
    if name == "Qwen2_5_VL" and seconds:
        more["second_per_grid_ts"] = torch.tensor(seconds)
    return items, kinds + [0] * rest, more


@pytest.mark.parametrize("name", FAMILIES)
@given(parts=parts, rest=st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_positions_equal_those_of_transformers(name, parts, rest):
    items, kinds, more = layout(name, parts, rest)
    length = len(kinds)
    wanted, delta = model_of(name).get_rope_index(torch.zeros(1, length, dtype=torch.long), torch.tensor([kinds]), **more)
    found = prompt_positions(items, length)
    assert found.tolist() == wanted[:, 0].tolist()
    assert highest_position(items, length) == int(delta) + length - 1
    assert decode_offset(items, length) == found[0, -1] + 1 - length  # the last token is of text


def test_items_without_a_grid_are_sequential():
    items = [MediaItem("image", 2, 4, "", ())]
    assert prompt_positions(items, 9).tolist() == [list(range(9))] * 3
    assert decode_offset(items, 9) == 0


def test_answers_continue_after_the_last_token():
    """As transformers' `generate` does, however late the last frame of a video is."""
    items = [MediaItem("video", 1, 4, "a", (), (), (4, 1, 1))]
    assert prompt_positions(items, 6).tolist() == [[0, 1, 2, 3, 4, 2], [0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2]]
    assert (decode_offset(items, 6), highest_position(items, 6)) == (-3, 4)
