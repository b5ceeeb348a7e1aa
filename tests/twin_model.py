"""The tiny model as a twin with another vocabulary: the same tokens under other numbers, and a few more. It says the same."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MORE = 5


def make_twin(directory: Path, model: Path) -> Path:
    """Numbers run backwards but for the special tokens."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    count = len(vocabulary)
    moved = [token if token < 2 else count + 1 - token for token in range(count)]
    tokenizer["model"]["vocab"] = {name: moved[token] for name, token in vocabulary.items()}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + MORE}))
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        matrix = tensors[name]
        twin = torch.zeros(len(matrix) + MORE, matrix.shape[1])
        twin[moved] = matrix[:count]
        tensors[name] = twin
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def pad(directory: Path, model: Path, more: int) -> Path:
    """The same with so many more rows that no token has, or fewer."""
    shutil.copytree(model, directory)
    config = json.loads((model / "config.json").read_text())
    size = config["vocab_size"] + more
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        matrix = torch.zeros(size, tensors[name].shape[1])
        matrix[: min(size, len(tensors[name]))] = tensors[name][:size]
        tensors[name] = matrix
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def say_words(model: Path) -> Path:
    """From now on the most likely token is a word with a blank before it, so that a text has one way to be encoded."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = [token for name, token in vocabulary.items() if name.startswith("Ġ") and name[1:].isascii() and name[1:].isalpha()]
    tensors = load_file(model / "model.safetensors")
    head = tensors["lm_head.weight"]
    others = torch.ones(len(head), dtype=torch.bool)
    others[words] = False
    head[others] = 0.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model
