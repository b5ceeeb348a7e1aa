"""Tensors reach their places whole, whatever their size, type and layout."""

import json
import struct

import pytest
import torch

from quire.load import assign as module
from quire.load import safetensors as files
from quire.load.assign import Mover, cut
from quire.load.safetensors import SafetensorsSource
from quire.load.source import TensorSlice, read_whole
from quire.progress import doing
from quire.types.errors import ModelError


@pytest.mark.parametrize("shape", [(), (0,), (5,), (1000,), (7, 100), (3, 200), (2, 3, 50), (1, 1, 999)])
def test_pieces_are_small_and_cover_everything_once(shape, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 400)
    tensor, place = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape), torch.full(shape, -1.0)
    for piece, its_place in cut(tensor, place):
        assert piece.nbytes <= 400
        assert (its_place == -1).all()
        its_place.copy_(piece)
    assert torch.equal(place, tensor)


def test_on_a_cpu_types_are_changed_on_the_way():
    place = torch.zeros(3, 2, dtype=torch.float32)
    with doing("loading", 24) as progress, Mover(progress) as mover:
        mover.put("w", torch.full((2, 3), 1.5, dtype=torch.bfloat16).t(), place)
    assert (place == 1.5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pieces_travel_to_a_gpu(dtype, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=dtype) for shape in [(300, 100), (1,), (), (5, 3000), (64, 64)]]
    tensors.append(tensors[0].t())
    places = [torch.zeros(tensor.shape, dtype=torch.bfloat16, device="cuda") for tensor in tensors]
    with doing("loading", 1) as progress, Mover(progress) as mover:
        for number, (tensor, place) in enumerate(zip(tensors, places, strict=True)):
            mover.put(str(number), tensor, place)
    for tensor, place in zip(tensors, places, strict=True):
        assert torch.equal(place.cpu(), tensor.bfloat16())


@pytest.mark.gpu
def test_what_goes_wrong_on_the_way_names_the_tensor():
    with pytest.raises(RuntimeError) as info, doing("loading", 1) as progress, Mover(progress) as mover:
        mover.put("model.norm", torch.zeros(3), torch.zeros(4, device="cuda"))
    assert "model.norm" in info.value.__notes__[0]


def write_by_hand(path, entries, data, padding=""):
    header = json.dumps(entries).encode() + padding.encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_tensors_that_lie_askew_are_read(tmp_path):
    values = torch.tensor([1.5, -2.0, 3.25])
    entries = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "floats": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [13, 13]},
    }
    write_by_hand(tmp_path / "m.safetensors", entries, b"\x07" + values.numpy().tobytes())
    source = SafetensorsSource(tmp_path, (tmp_path / "m.safetensors",))
    read = read_whole(source)
    assert torch.equal(read["floats"], values)
    assert (read["byte"].item(), read["none"].shape) == (7, (0, 4))


@pytest.mark.parametrize("before", [0, 1])
def test_slices_are_read_wherever_they_lie(tmp_path, before):
    values = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
    entries = {
        "bytes": {"dtype": "U8", "shape": [before], "data_offsets": [0, before]},
        "floats": {"dtype": "F32", "shape": [4, 6, 5], "data_offsets": [before, before + values.nbytes]},
    }
    size = len(json.dumps(entries).encode())
    write_by_hand(tmp_path / "m.safetensors", entries, b"\x07" * before + values.numpy().tobytes(), " " * (-size % 8))
    source = SafetensorsSource(tmp_path, (tmp_path / "m.safetensors",))
    some = [TensorSlice("floats", ranges) for ranges in (((1, 3), (0, 6), (0, 5)), ((0, 4), (2, 5), (1, 2)))]
    read = dict(source.read(some))
    assert torch.equal(read[some[0]], values[1:3])
    assert torch.equal(read[some[1]], values[:, 2:5, 1:2])


def test_a_type_nobody_can_read_is_named(tmp_path):
    write_by_hand(tmp_path / "m.safetensors", {"odd": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\x00")
    source = SafetensorsSource(tmp_path, (tmp_path / "m.safetensors",))
    with pytest.raises(ModelError, match=r"m\.safetensors: tensor 'odd' is stored as F4"):
        read_whole(source)


def test_tensors_are_the_same_after_they_were_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_READ_BYTES_IN_MEMORY", 4096)
    size = 3000
    entries = {
        f"t{i}": {"dtype": "F32", "shape": [size], "data_offsets": [i * 4 * size, (i + 1) * 4 * size]} for i in range(20)
    }
    values = torch.arange(20 * size, dtype=torch.float32).view(20, size)
    write_by_hand(tmp_path / "m.safetensors", entries, values.numpy().tobytes())
    source = SafetensorsSource(tmp_path, (tmp_path / "m.safetensors",))
    read = read_whole(source)
    assert all(torch.equal(read[f"t{i}"], values[i]) for i in range(20))
