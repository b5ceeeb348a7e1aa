import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.files.safetensors import HeaderLimits, TensorInfo, read_header
from quire.types.errors import ModelError


def test_header_of_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)}, path, metadata={"format": "pt"})
    start = path.stat().st_size - 32
    assert read_header(path) == {"a": TensorInfo("F32", (2, 3), 24, start), "b": TensorInfo("F16", (4,), 8, start + 24)}


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = b'{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "only 3 bytes"),
        (_file(b"{}", length=2**40), "its header should be"),
        (_file(b"not json"), "not JSON"),
        (_file([1]), "character 0 must begin an object"),
        (_file(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} '), "must begin a comma"),
        (_file(b'{"__metadata__": {"a": 1}}'), "must begin a string"),
        (_file(b'{"__metadata__": {}} {'), "must begin the end"),
        (_file({"a": {"shape": [0] * 9999}}), "at most 4,096 characters"),
        (_file(b'{"a": ' + ENTRY + b', "a": ' + ENTRY + b"}", b"0" * 4), "has tensor 'a' twice"),
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


def test_a_large_header_is_parsed_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of it would hold the interpreter lock, and with it every thread of a server."""
    count, sizes = 2000, list[int]()

    def read(text: str) -> object:
        sizes.append(len(text))
        return json.loads(text)

    monkeypatch.setattr("quire.files.safetensors.read_json", read)
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        _file({f"layer {i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}, b"0" * count)
    )
    assert len(read_header(path)) == count
    assert len(sizes) == count and max(sizes) < 100


def test_a_header_beyond_its_limits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(_file(b"{" * 1001))
    with pytest.raises(ModelError, match="its header must have at most 1,000 bytes; got 1,001"):
        read_header(path, HeaderLimits(bytes=1000))
    path.write_bytes(_file({str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(4)}))
    assert len(read_header(path, HeaderLimits(tensors=4))) == 4
    with pytest.raises(ModelError, match="its header must have at most 3 tensors; got more"):
        read_header(path, HeaderLimits(tensors=3))
