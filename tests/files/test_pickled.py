"""Files of torch.save: shapes without torch, and nothing is run."""

import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path

import pytest
import torch

from quire.files.adapter import AdapterBounds, check_header
from quire.files.pickled import MAX_TABLE_BYTES, read_shapes, read_tensor
from quire.types.errors import AdapterError

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def tensors(rank: int = 8) -> dict[str, torch.Tensor]:
    return {
        NAME.format("A"): torch.zeros(rank, 32).bfloat16(),
        NAME.format("B"): torch.zeros(64, rank),
        "scalar": torch.zeros(()),
    }


@pytest.mark.parametrize("protocol", [2, 4])
def test_shapes(tmp_path: Path, protocol: int) -> None:
    path, shared = tmp_path / "a.bin", torch.zeros(6, 4)
    found = tensors() | {"whole": shared, "part": shared[2:, 1], "learnt": torch.nn.Parameter(torch.ones(3))}
    expected = {name: tuple(tensor.shape) for name, tensor in found.items()}
    for table in (found, OrderedDict(found)):
        torch.save(table, path, pickle_protocol=protocol)
        assert read_shapes(path) == expected


def saved(tensor: torch.Tensor) -> bytes:
    file = BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


VALUES = torch.arange(30, dtype=torch.float32).reshape(5, 6) / 7


@pytest.mark.parametrize(
    "tensor",
    [
        VALUES, VALUES.bfloat16(), VALUES.half(), VALUES.double(), VALUES[1:, ::2], VALUES.t(), VALUES[None], VALUES[0, 0],
        torch.arange(4), torch.arange(4, dtype=torch.int32), torch.nn.Parameter(VALUES), VALUES[:1].expand(3, 6),
    ],
)  # fmt: skip
def test_a_tensor(tensor: torch.Tensor) -> None:
    found = read_tensor(saved(tensor), 1 << 20)
    expected = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    assert found is not None and torch.equal(torch.from_numpy(found.copy()), expected)


def test_what_is_no_tensor() -> None:
    for data in (b"", b"x" * 100, saved(VALUES.to_sparse()), saved(VALUES > 1), saved(torch.zeros(0, 4)), saved(VALUES)[:-50]):
        assert read_tensor(data, 1 << 20) is None
    assert read_tensor(saved(VALUES), 30 * 4) is not None and read_tensor(saved(VALUES), 29 * 4) is None
    table = BytesIO()
    torch.save({"a": VALUES}, table)
    assert read_tensor(table.getvalue(), 1 << 20) is None


def test_a_table_of_many(tmp_path: Path) -> None:
    """As many as a large model's adapter has; beyond that somebody else looks."""
    torch.save({f"layers.{index}.lora_A.weight": torch.zeros(1, 1) for index in range(2000)}, tmp_path / "a.bin")
    assert len(read_shapes(tmp_path / "a.bin") or ()) == 2000
    torch.save({"x" * MAX_TABLE_BYTES: torch.zeros(1)}, tmp_path / "b.bin")
    assert read_shapes(tmp_path / "b.bin") is None


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("touched"),)  # type: ignore[return-value]


def archive(path: Path, text: bytes, **options: int) -> Path:
    with zipfile.ZipFile(path, "w", **options) as file:  # type: ignore[arg-type]
        file.writestr("archive/data.pkl", text)
    return path


def nested() -> bytes:
    """A key that takes forever to hash."""
    return b"\x80\x02}(" + b"K\x01" + b"2\x86" * 60 + b"Nu."


def unicode(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


HOSTILE = {
    "a name that doubles": b"\x80\x02" + unicode("a") + b"q\x00" + b"h\x00h\x00\x93q\x00" * 60 + b".",
    "a name of twos of twos": b"\x80\x02" + unicode("a") + b"q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"h\x00\x93.",
    "long names": b"\x80\x02" + unicode("a" * 500_000) + b"q\x00" + b"h\x00h\x00\x93" * 60_000 + b".",
    "a long shape again and again": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00NN("
    + b"K\x01" * 200_000
    + b"t\x87q\x01"
    + b"h\x00h\x01R" * 100_000
    + b".",
    "a call": pickle.dumps({"a": Evil()}),
    "a key without an end": nested(),
    "nothing to take": b"\x80\x02\x86.",
    "no mark": b"\x80\x02t.",
    "numbers in words": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00X\x01\x00\x00\x00xtR.",
    "no end": b"\x80\x02}",
    "no bytes": b"",
    "a list": pickle.dumps([1, 2]),
    "a table of numbers": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_not_known_is_left_alone(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_shapes(archive(tmp_path / "a.bin", HOSTILE[what])) is None
    assert not (tmp_path / "touched").exists()


def test_a_far_place_takes_no_memory(tmp_path: Path) -> None:
    assert read_shapes(archive(tmp_path / "a.bin", b"\x80\x02}r\xff\xff\xff\x7f.")) == {}


def test_other_files(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save(tensors(), tmp_path / "whole.bin")
    data = (tmp_path / "whole.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.bin").write_bytes(b"not a file of torch's")
    (tmp_path / "empty.bin").write_bytes(b"")
    small = archive(tmp_path / "small.bin", pickle.dumps({}), compression=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "two.bin", "w") as file:
        file.writestr("a/data.pkl", b"N.")
        file.writestr("b/data.pkl", b"N.")
    for path in ("old", "cut", "text", "empty", "two", "missing"):
        assert read_shapes(tmp_path / f"{path}.bin") is None
    assert read_shapes(small) is None


def end(size: int, offset: int) -> bytes:
    return b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, 1, 1, size, offset, 0)


def test_sizes_that_are_not_so(tmp_path: Path) -> None:
    """Of a directory (by the record that is read, not by the one that is pointed to) and of an entry: nothing is read beyond
    what a table takes."""
    large, name = 1 << 31, b"a/data.pkl"
    with (tmp_path / "directory.bin").open("wb") as file:
        file.write(b"PK\x06\x06" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 1, 1, 10, 0))
        file.seek(large)
        file.write(b"PK\x06\x06" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 1, 1, large - 100, 100))
        file.write(b"PK\x06\x07" + struct.pack("<IQI", 0, 0, 1) + end(0xFFFFFFFF, 0xFFFFFFFF))
    with (tmp_path / "entry.bin").open("wb") as file:
        file.write(b"PK\x03\x04" + struct.pack("<5H3I2H", 20, 0, 0, 0, 0, 0, 100, 100, len(name), 0) + name + b"\x80\x02}.")
        file.seek(large)
        sizes = (large - 100, 100, len(name))
        file.write(b"PK\x01\x02" + struct.pack("<6H3I5H2I", 20, 20, 0, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, 0, 0) + name)
        file.write(end(file.tell() - large, large))
    tracemalloc.start()
    try:
        assert read_shapes(tmp_path / "directory.bin") is None
        assert read_shapes(tmp_path / "entry.bin") is None
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_TABLE_BYTES
    finally:
        tracemalloc.stop()


def test_a_rank_is_found_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    torch.save(tensors(rank=32), tmp_path / "adapter_model.bin")
    check_header(str(tmp_path), AdapterBounds(max_rank=32))
    with pytest.raises(AdapterError, match=r"lora_A.weight' has rank 32; max_lora_rank is 16; start with --max-lora-rank 32"):
        check_header(str(tmp_path), AdapterBounds(max_rank=16))


def test_without_torch(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "a.bin")
    code = (
        "import sys; from pathlib import Path; from quire.files.pickled import read_shapes; "
        "print(len(read_shapes(Path(sys.argv[1]))), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.bin")], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["3", "False"]
