"""Files of sentence-transformers: what each setting means, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.features.pooling.sentence_files import Dense, SentenceFiles, read_sentence_files
from quire.types.errors import ModelError

KINDS = "sentence_transformers.models."


def write(
    folder: Path,
    modules: list[tuple[str, str]],
    pooling: dict[str, Any] | None = None,
    dense: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    lengths: dict[str, Any] | None = None,
) -> Path:
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": KINDS + kind}
        for number, (path, kind) in enumerate([("", "Transformer"), *modules])
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for inner, content in (("1_Pooling", pooling), ("2_Dense", dense)):
        if content is not None:
            (folder / inner).mkdir()
            (folder / inner / "config.json").write_text(json.dumps(content))
    for name, content in (("config_sentence_transformers.json", settings), ("sentence_bert_config.json", lengths)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def flags(**true: bool) -> dict[str, Any]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 8, **{f"pooling_mode_{name}": true.get(name, False) for name in names}}


def save_dense(folder: Path, *, bias: bool = True) -> None:
    tensors = {"linear.weight": np.zeros((4, 8), np.float32)}
    if bias:
        tensors["linear.bias"] = np.zeros(4, np.float32)
    save_file(tensors, folder / "2_Dense" / "model.safetensors")


POOLING = [("1_Pooling", "Pooling")]
DENSE = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


def test_a_folder_without_modules_has_nothing_to_say(tmp_path: Path) -> None:
    assert read_sentence_files(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        (flags(mean_tokens=True), "MEAN"),
        (flags(cls_token=True), "CLS"),
        (flags(lasttoken=True), "LAST"),
        ({"embedding_dimension": 8, "pooling_mode": "mean"}, "MEAN"),
        ({"embedding_dimension": 8, "pooling_mode": ["lasttoken"]}, "LAST"),
    ],
)
def test_the_pooling_mode_is_read_in_both_spellings(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    found = read_sentence_files(write(tmp_path, POOLING, config))
    assert found == SentenceFiles(pooling=pooling)  # type: ignore[arg-type]


def test_all_files_together(tmp_path: Path) -> None:
    modules = [*POOLING, ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
    settings = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "document", "similarity_fn_name": "dot"}
    lengths = {"max_seq_length": 128, "do_lower_case": True}
    write(tmp_path, modules, {**flags(mean_tokens=True), "include_prompt": False}, DENSE, settings, lengths)
    save_dense(tmp_path)
    found = read_sentence_files(tmp_path)
    assert found is not None
    assert found.dense == (Dense(tmp_path / "2_Dense" / "model.safetensors", 8, 4, bias=True, activation="tanh"),)
    assert (found.normalize, found.include_prompt, found.max_seq_length, found.lower_case) == (True, False, 128, True)
    assert (found.prompts, found.default_prompt) == ({"query": "query: ", "document": ""}, "document")
    assert found.similarity == "dot"


def test_without_a_pooling_module_every_token_has_a_vector(tmp_path: Path) -> None:
    """ColBERT."""
    config = {**DENSE, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    write(tmp_path, [("2_Dense", "Dense")], dense=config)
    save_dense(tmp_path, bias=False)
    found = read_sentence_files(tmp_path)
    assert found is not None
    assert found.pooling is None
    assert found.dense[0].activation == "identity"


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (POOLING, flags(max_tokens=True), "pooling mode 'max' is not supported"),
        (POOLING, flags(weightedmean_tokens=True), "pooling mode 'weightedmean' is not supported"),
        (POOLING, flags(cls_token=True, mean_tokens=True), "one pooling mode must be set, got cls, mean"),
        (POOLING, flags(), "one pooling mode must be set, got none"),
        ([("1_Pooling", "CNN")], None, "CNN.* is not supported"),
        ([("../elsewhere", "Pooling")], None, "inside the model's folder"),
        ([*POOLING, ("2_Normalize", "Normalize"), *POOLING], flags(mean_tokens=True), "a module after Normalize"),
        ([*POOLING, ("", "Transformer")], flags(mean_tokens=True), "the first module"),
        ([("1_Pooling", "Pooling")], None, "config.json: must be a JSON object, and is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, modules: list[tuple[str, str]], pooling: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_sentence_files(write(tmp_path, modules, pooling))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, "activation_function .*Softmax.* is not supported"),
        ({"in_features": 0}, "must be positive integers"),
        ({"out_features": 5}, "must have"),
        ({"use_residual": True}, "use_residual is not supported"),
    ],
)
def test_a_dense_module_that_cannot_be_run_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path, [*POOLING, ("2_Dense", "Dense")], flags(mean_tokens=True), {**DENSE, **change})
    save_dense(tmp_path)
    with pytest.raises(ModelError, match=message):
        read_sentence_files(tmp_path)


def test_dense_weights_must_be_safetensors(tmp_path: Path) -> None:
    write(tmp_path, [*POOLING, ("2_Dense", "Dense")], flags(mean_tokens=True), DENSE)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not read"):
        read_sentence_files(tmp_path)


def test_a_default_prompt_must_exist(tmp_path: Path) -> None:
    write(tmp_path, POOLING, flags(mean_tokens=True), settings={"prompts": {}, "default_prompt_name": "query"})
    with pytest.raises(ModelError, match="default_prompt_name must be one of no prompts; got 'query'"):
        read_sentence_files(tmp_path)


def test_the_longest_text_must_be_a_positive_integer(tmp_path: Path) -> None:
    write(tmp_path, POOLING, flags(mean_tokens=True), lengths={"max_seq_length": 0})
    with pytest.raises(ModelError, match="max_seq_length must be a positive integer or null"):
        read_sentence_files(tmp_path)
