"""Whether two models have the same tokens, told by their files alone: vocabularies are often padded, each to its own size."""

from typing import Any

from quire.files.gguf import read_gguf
from quire.files.reading import read_object
from quire.files.resolve import ModelFiles


def same_tokens(one: ModelFiles, other: ModelFiles) -> bool:
    """Has either of them only tokens that the other has, too, under the same numbers? False if files do not tell."""
    fewer, more = sorted((_tokens(one), _tokens(other)), key=len)
    return bool(fewer) and fewer.items() <= more.items()


def _tokens(files: ModelFiles) -> dict[int, str]:
    if files.format == "gguf":
        listed = read_gguf(files.path).metadata.get("tokenizer.ggml.tokens")
        return dict(enumerate(listed)) if isinstance(listed, list) else {}
    described = read_object(files.path / "tokenizer.json") or {}
    model: Any = described.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    try:
        named = vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], i) for i, row in enumerate(vocabulary or ()))
        tokens = {int(number): str(name) for name, number in named}
        return tokens | {int(added["id"]): str(added["content"]) for added in described.get("added_tokens") or ()}
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # whoever reads the tokenizer says what is wrong with it
        return {}
