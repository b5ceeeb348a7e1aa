import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import tiny_llama, write_gguf
from quire.files.gguf import GGML_TYPES, READABLE_TYPES, read_gguf, read_gguf_shards
from quire.types.errors import ModelError


def test_metadata_and_tensors_come_back(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float16)}
    metadata = {"x.flag": True, "x.count": 7, "x.text": "grüße", "x.list": [1, 2, 3], "x.names": ["", "ä", "long" * 100]}
    header = read_gguf(write_gguf(tmp_path / "m.gguf", metadata=metadata, tensors=tensors))
    assert header.architecture == "llama"
    assert {key: header.metadata[key] for key in metadata} == metadata
    data = (tmp_path / "m.gguf").read_bytes()
    assert header.tensors["a"].shape == (2, 3)
    for name, array in tensors.items():
        tensor = header.tensors[name]
        assert tensor.elements == array.size
        found = np.frombuffer(data[tensor.offset : tensor.offset + tensor.nbytes], dtype=array.dtype)
        assert np.array_equal(found, array.ravel())


def test_quantized_sizes(tmp_path: Path) -> None:
    block = np.zeros((3, 2 * 34), np.uint8)
    header = read_gguf(write_gguf(tmp_path / "m.gguf", tensors={"q": (block, gguf.GGMLQuantizationType.Q8_0)}))
    assert header.tensors["q"].shape == (3, 64)
    assert header.tensors["q"].nbytes == 3 * 68
    assert GGML_TYPES[header.tensors["q"].type][0] == "Q8_0"


def test_types_are_those_of_the_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    shared = theirs.keys() & GGML_TYPES.keys()  # another version of the package may know more or fewer
    assert len(shared) > 25
    assert {number: theirs[number] for number in shared} == {number: GGML_TYPES[number] for number in shared}
    assert set(READABLE_TYPES) <= {name for name, _, _ in GGML_TYPES.values()}


def test_a_file_cut_anywhere_is_a_model_error(tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 7), len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    whole = bytearray(tiny_llama(tmp_path / "m.gguf").read_bytes())
    random = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(whole)
        at = int(random.integers(0, 2500))
        broken[at : at + 8] = random.bytes(8)
        (tmp_path / "b.gguf").write_bytes(broken)
        try:
            read_gguf(tmp_path / "b.gguf")
        except ModelError as error:
            assert "b.gguf" in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "announces"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "announces"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"x" * 64, "broken"),
    ],
)
def test_what_is_not_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(("moved", "message"), [(1, "no multiple of 32"), (32, "'blk.0.attn_k.weight' and .* overlap")])
def test_tensors_have_places_of_their_own(tmp_path: Path, moved: int, message: str) -> None:
    path, name = tiny_llama(tmp_path / "m.gguf"), b"blk.0.attn_k.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4  # behind the number of dimensions, the dimensions and the type
    struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] + moved)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_shards_must_belong_together(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "1.gguf", metadata={"split.tensors.count": 2}, tensors={"a": np.ones(4, np.float32)})
    two = write_gguf(tmp_path / "2.gguf", tensors={"b": np.ones(4, np.float32)})
    assert [list(header.tensors) for header in read_gguf_shards([one, two])] == [["a"], ["b"]]
    with pytest.raises(ModelError, match="also in"):
        read_gguf_shards([one, one])
    with pytest.raises(ModelError, match="announces 2"):
        read_gguf_shards([one])
