"""Model directories with files that would hang or abort the start: each is refused, and the error names the file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import TEXT, open_model

from quire import SamplingParams
from quire.types.errors import ModelError

READ = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "model.safetensors.index.json", "model.safetensors",
)  # fmt: skip


@pytest.fixture
def directory(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize("place", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "zeros"])
@pytest.mark.parametrize("name", READ)
def test_only_regular_files_are_read(directory: Path, name: str, place: Callable[[Path], None]) -> None:
    (directory / name).unlink(missing_ok=True)
    place(directory / name)
    with pytest.raises(ModelError, match=f"{name}: cannot be read: it is not a regular file"):
        open_model(directory)


def edit_tokenizer(directory: Path, **stages: Any) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stages))


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
DOUBLE_BY_REGEX = {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "a"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE = {
    "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"], "special_tokens": {},
}  # fmt: skip
BEGIN = {"SpecialToken": {"id": "<s>", "type_id": 0}}
MANY = {**TWICE, "single": [BEGIN], "special_tokens": {"<s>": {"id": "<s>", "ids": [0] * 5000, "tokens": ["<s>"] * 5000}}}
EXPLODING = {
    "normalizer": ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}}, "normalizer must not make a text more"),
    "regex": ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE_BY_REGEX] * 40}}, "normalizer must not make"),
    "untyped": (
        {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}},
        "normalizer must not make a text more",
    ),
    "bytes": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 40}}, "pre_tokenizer must not make"),
    "template": ({"post_processor": {"type": "Sequence", "processors": [TWICE] * 40}}, "post_processor must not make"),
    "special tokens": ({"post_processor": MANY}, "post_processor must add at most 4,096 tokens to a text; got 5,000"),
}


@pytest.mark.parametrize("case", EXPLODING)
def test_stages_that_make_any_text_endless_are_refused(directory: Path, case: str) -> None:
    stages, message = EXPLODING[case]
    edit_tokenizer(directory, **stages)
    with pytest.raises(ModelError, match=f"tokenizer.json: {message}"):
        open_model(directory)


def test_padding_and_truncation_of_a_tokenizer_are_not_used(directory: Path) -> None:
    """A padding of two thousand million tokens aborted the process."""
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    params = SamplingParams(temperature=0, max_tokens=1)
    expected = open_model(directory).generate(TEXT[0], params, use_tqdm=False)[0].prompt_token_ids
    edit_tokenizer(directory, padding={"strategy": {"Fixed": 2_000_000_000}, **padding}, truncation=truncation)
    assert open_model(directory).generate(TEXT[0], params, use_tqdm=False)[0].prompt_token_ids == expected
