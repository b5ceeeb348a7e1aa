"""Towers loaded from tiny random checkpoints that transformers wrote, and pictures for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.features.media.families import media_family
from quire.features.media.families.base import MediaFamily
from quire.features.media.towers.base import Tower
from quire.load.assign import assign, slices_of_model
from quire.load.load import materialize
from quire.load.safetensors import SafetensorsSource

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip


def randomized(model: nn.Module) -> nn.Module:
    """Return the model with random values for everything that initializes to a constant."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.std() < 0.1:
                parameter.normal_(0.0, 0.15)
    return model.float().eval()


def save(model: Any, directory: Path) -> dict[str, Any]:
    """Write the checkpoint as transformers does. Return its config.json."""
    model.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def open_family(config: dict[str, Any]) -> MediaFamily:
    family = media_family(config["architectures"][0], config)
    assert family is not None
    return family


def open_tower(config: dict[str, Any], directory: Path) -> Tower:
    """Build the family's tower and load it in float32."""
    from importlib import import_module

    module, name = open_family(config).tower.split(":")
    with torch.device("meta"):
        tower = getattr(import_module(f"quire.features.media.towers.{module}"), name)(config)
    materialize(tower, torch.device("cpu"), torch.float32)
    source = SafetensorsSource(directory, tuple(sorted(directory.glob("*.safetensors"))))
    assign(slices_of_model(tower), source, tower.renames, str(directory))
    for part in tower.modules():
        if hasattr(type(part), "finish"):
            part.finish(torch.device("cpu"))
    return tower.eval()


def picture(width: int, height: int, seed: int = 0) -> Any:
    """Return a picture of noise over a gradient, so that neither scaling nor cutting leaves it as it is."""
    from PIL import Image

    random = np.random.default_rng(seed)
    slope = np.linspace(0, 200, height * width * 3).reshape(height, width, 3)
    return Image.fromarray((slope + random.integers(0, 56, slope.shape)).astype(np.uint8))


def tensors(arrays: Any) -> dict[str, Tensor]:
    return {name: torch.as_tensor(np.asarray(value)) for name, value in arrays.items()}


def render(family: MediaFamily, tokenizer: Any, text: str, arrays: list[Any]) -> list[int]:
    """Return the prompt's tokens as the API makes them: text around images, one placeholder each, which is then replaced."""

    def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    [mark] = tokenize(placeholder := family.placeholder("image"))
    found = [family.expand("image", each, tokenize) for each in arrays]
    if placeholder in text:
        first, *rest = text.split(placeholder)
        marks = [f"{each.before}{placeholder}{each.after}" for each in found]
        text = first + "".join(mark + part for mark, part in zip(marks, rest, strict=True))
    text = family.complete_text(text, len(arrays))
    ids, queue = list[int](), iter(found)
    for token in tokenizer.encode(text, add_special_tokens=family.adds_special_tokens):
        ids += next(queue).tokens if token == mark else [token]
    for each, item in zip(found, arrays, strict=True):
        spans = each.embedded or ((0, len(each.tokens)),)
        assert {each.tokens[i] for start, count in spans for i in range(start, start + count)} == {family.image_token}, item
        assert sum(count for _, count in spans) == each.tokens.count(family.image_token)
    return ids


def check_embeddings(tower: Tower, arrays: list[Any], expected: list[Tensor]) -> None:
    """Check the tower's embeddings of each item alone, and of all in one call in either order."""
    items = [tensors(each) for each in arrays]
    with torch.inference_mode():
        alone = [tower.encode("image", [item])[0] for item in items]
        together = [tower.encode("image", items), tower.encode("image", items[::-1])[::-1]]
    for index, wanted in enumerate(expected):
        for found in (alone[index], *(each[index] for each in together)):
            assert largest_difference(found, wanted) < 1e-4, index


def largest_difference(one: Tensor, two: Tensor) -> float:
    assert one.shape == two.shape, (one.shape, two.shape)
    return float((one - two).abs().max())
