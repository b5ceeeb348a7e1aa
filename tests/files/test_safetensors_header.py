import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.files.safetensors import TensorInfo, read_header
from quire.types.errors import ModelError


def test_header_of_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)}, path, metadata={"format": "pt"})
    start = path.stat().st_size - 32
    assert read_header(path) == {"a": TensorInfo("F32", (2, 3), 24, start), "b": TensorInfo("F16", (4,), 8, start + 24)}


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "only 3 bytes"),
        (_file(b"{}", length=2**40), "its header should be"),
        (_file(b"not json"), "not JSON"),
        (_file([1]), "not a JSON object"),
        (_file({"a": {"dtype": "F32"}}), "lacks dtype, shape or data_offsets"),
        (_file({"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}), "unknown dtype"),
        (_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0" * 4), "cannot be 4 bytes"),
        (_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"0" * 4), "truncated"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert "m.safetensors" in str(caught.value)
