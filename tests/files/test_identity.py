"""Digests tell checkpoints apart although most of a large file is not read."""

import json
import struct
from pathlib import Path

import pytest

from quire.files import identity as module
from quire.files.identity import WEIGHTS, identity
from quire.files.resolve import ModelFiles

COUNT, ROWS = 40, 1 << 18  # tensors of a file, and their float32 values: 40 MiB


def write(path: Path, changed: int | None = None) -> Path:
    """A checkpoint of equal tensors, sparse on the disk; the values of one may be others."""
    size = 4 * ROWS
    entries = {
        f"layers.{i}": {"dtype": "F32", "shape": [ROWS], "data_offsets": [i * size, (i + 1) * size]} for i in range(COUNT)
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        start = file.tell()
        file.truncate(start + COUNT * size)
        if changed is not None:
            file.seek(start + changed * size)
            file.write(b"\1" * size)
    return path


def digest(*weights: Path) -> str:
    return identity(ModelFiles("m", weights[0].parent, "hf", weights))[WEIGHTS]


@pytest.mark.parametrize("files", [1, 3])
def test_one_tensor_of_a_large_checkpoint_decides(tmp_path, files):
    same = [write(tmp_path / f"same-{i}.safetensors") for i in range(files)]
    copy = [write(tmp_path / f"copy-{i}.safetensors") for i in range(files)]
    assert digest(*same) == digest(*copy)
    digests = {digest(*same)}
    for changed in range(COUNT):
        digests.add(digest(*same[:-1], write(tmp_path / "other.safetensors", changed)))
    assert len(digests) == 1 + COUNT


def test_few_bytes_are_read_of_many_tensors(tmp_path, monkeypatch):
    """The samples of all files together are bounded."""
    monkeypatch.setattr(module, "MAX_TENSOR_SAMPLES", 20)
    path = write(tmp_path / "m.safetensors")
    ranges = list(module._sampled_ranges(path, path.stat().st_size, 20))
    assert len(ranges) == module.SAMPLES + 20 and len(set(ranges)) == len(ranges)
    assert digest(path) != digest(write(tmp_path / "other.safetensors", COUNT - 2))  # every second tensor
    assert digest(path, path) != digest(path)
