"""Checkpoints that are broken, or meant to break something: one line that names the file, whoever trips over it."""

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import open_model

from gguf_files import tiny_llama
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.text.tokenizer_files import load_tokenizer
from quire.types.errors import ModelError, QuireError

DEEP = "[" * 200_000
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(directory: Path) -> str:
    """Of the whole engine, in its own words."""
    with pytest.raises(QuireError) as caught:
        open_model(directory)
    message = str(caught.value)
    assert "model" in message and len(message) < 1500, message
    assert "\n" not in message or "does not fit the model" in message, message
    return message


def change(path: Path, **fields: Any) -> None:
    """`...` removes a field."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (old | fields).items() if value is not ...}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize("text", ["", "[1]", "{", DEEP, '{"a": ' + DEEP, "1" * 5000, '"\xff"', "null"])
def test_json_that_is_none(model, name, text):
    (model / name).write_bytes(text.encode("latin-1"))
    assert name in refusal(model)


def test_json_without_end(model):
    with (model / "config.json").open("ab") as file:
        file.truncate(1 << 30)  # a hole: it takes no room
    assert "is too large; got 1,073,741,824 bytes" in refusal(model)


ODD = (None, [], "x", -1, 1.5, True, 1 << 40, math.nan)
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size")
OTHERS = ("head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "rope_scaling", "max_position_embeddings", "layer_types",
          "sliding_window", "model_type", "architectures", "dtype", "eos_token_id", "text_config",
          "quantization_config")  # fmt: skip


@pytest.mark.parametrize("field", (*SIZES, *OTHERS))
def test_configurations_of_odd_values(model, field):
    """Some run: a tiny model does not mind. No size does, for the tensors are what they are."""
    for value in ODD:
        change(model / "config.json", **{field: value})
        try:
            open_model(model)
        except QuireError as error:
            assert "\n" not in str(error) or "does not fit" in str(error)
            assert "model" in str(error) and len(str(error)) < 1500
        else:
            assert field not in SIZES or (field, value) == ("num_key_value_heads", None), (field, value)


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": "x"}, {"rope_theta": -1.0}, {"rope_theta": [1]}, {"rope_type": 5}, {"rope_type": []},
     {"rope_type": "yarn", "factor": "x"}, {"rope_type": "yarn"}, {"rope_type": "llama3", "factor": None},
     {"rope_type": "longrope", "long_factor": 5, "short_factor": 6}, {"rope_type": "linear", "factor": 0},
     {"partial_rotary_factor": "x"}, {"partial_rotary_factor": math.inf}],
)  # fmt: skip
def test_odd_rotations(model, rope):
    change(model / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope})
    try:
        open_model(model)
    except QuireError as error:
        assert "\n" not in str(error)


def header(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any = (1,), offsets: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"1234567", header(b""), header(b"{}", length=2**63), header(b"{}", length=2**64 - 1), header(DEEP.encode()),
        header({"a": 1}), header({"a": []}), header({"a": "dtype"}), header(entry(None)), header(entry(["1"])),
        header(entry([math.nan])), header(entry([math.inf]), b"0000"), header(entry([-1, -1]), b"0000"),
        header(entry([True]), b"0000"),
        header(entry([2**70]), b"0000"), header(entry(offsets=[4, 0]), b"0000"), header(entry(offsets=[-4, 0]), b"0000"),
        header(entry(offsets=[0, 4, 8]), b"0000"), header(entry(offsets="04"), b"0000"), header(entry(dtype=["F32"]), b"0000"),
        header(entry(dtype="F33"), b"0000"), header(entry(dtype={}), b"0000"), header(entry(shape={"1": 1}), b"0000"),
        header(entry() | {"b": entry()["a"]}, b"0000"), header({"x" * 100_000: 1}),
    ],
)  # fmt: skip
def test_safetensors_headers(model, content):
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(model)


def test_weights_that_are_not_floats(model):
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.norm.weight": np.ones(32, np.int8)}, model / "model.safetensors")
    assert "'model.norm.weight' is stored as torch.int8" in refusal(model)


def test_what_only_looks_like_a_file(model):
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")  # whoever opens it waits for ever
    assert "not a regular file" in refusal(model)


@pytest.mark.parametrize("file", ["/etc/passwd", "../other/model.safetensors", "x/../../other/model.safetensors", "", "a\0b"])
def test_an_index_names_no_files_elsewhere(model, file):
    shutil.copytree(model, model.parent / "other")
    (model / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    assert "which is not in its directory" in refusal(model)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": {"a": ["b"]}}])
def test_an_index_of_another_kind(model, content):
    (model / INDEX).write_text(json.dumps(content))
    assert INDEX in refusal(model)


def test_files_of_an_index_may_be_links(model):
    """As in the hub's cache, where snapshots are links to blobs."""
    blob = model.parent / "blob"
    (model / "model.safetensors").rename(blob)
    (model / "model-00001-of-00001.safetensors").symlink_to(blob)
    names = load_file(blob)
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    open_model(model)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 5}', DEEP, '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_tokenizers(model, text):
    (model / "tokenizer.json").write_text(text)
    assert "tokenizer.json" in refusal(model)


@pytest.mark.parametrize(
    "fields",
    [{"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": {"1": 5}},
     {"chat_template": [5]}, {"chat_template": [{"name": "a"}]}, {"chat_template": {"a": 5}}],
)  # fmt: skip
def test_tokenizer_settings(model, fields):
    change(model / "tokenizer_config.json", **fields)
    try:
        load_tokenizer(resolve_model(model))
    except ModelError as error:
        assert str(model) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    "fields",
    [{"rope.freq_base": "x"}, {"rope.dimension_count": "x"}, {"attention.head_count": [0]}, {"attention.head_count": "x"},
     {"attention.head_count_kv": 0}, {"block_count": 2**31}, {"context_length": 0}, {"rope.scaling.type": 5},
     {"attention.layer_norm_rms_epsilon": "x"}, {"feed_forward_length": "x"}, {"embedding_length": 2**31}],
)  # fmt: skip
def test_gguf_metadata(tmp_path, fields):
    metadata = {f"llama.{name}": value for name, value in fields.items()}  # over those that its tensors are made by
    path = tiny_llama(tmp_path / "model.gguf", metadata=metadata)
    assert str(path) in refusal(path)


@pytest.mark.parametrize("metadata", [{"tokenizer.ggml.tokens": 5}, {"tokenizer.ggml.token_type": "x"},
                                      {"tokenizer.ggml.bos_token_id": "x"}, {"general.alignment": 0}])  # fmt: skip
def test_gguf_tokenizers(tmp_path, metadata):
    assert "model.gguf" in refusal(tiny_llama(tmp_path / "model.gguf", metadata=metadata))


def test_damaged_gguf_metadata_is_a_model_error(tmp_path):
    whole = tiny_llama(tmp_path / "model.gguf").read_bytes()
    random = np.random.default_rng(1)
    path = tmp_path / "broken.gguf"
    for _ in range(200):
        at = int(random.integers(24, 2400))
        path.write_bytes(whole[:at] + random.bytes(4) + whole[at + 4 :])
        try:
            files = resolve_model(path)
            read_facts(files)
            load_tokenizer(files)
        except ModelError as error:
            assert "broken.gguf" in str(error) and "\n" not in str(error)
