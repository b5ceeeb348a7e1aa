"""Compare checkpoints by their files: digests that tell two checkpoints from each other, and equal vocabularies."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from quire.files.gguf import read_gguf
from quire.files.reading import open_regular, read_object
from quire.files.resolve import ModelFiles
from quire.types.errors import ModelError

WEIGHTS = "weights"
DIGESTED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "params.json", "tekken.json",
    "quant_config.json", "quantize_config.json", "hf_quant_config.json",
)  # fmt: skip  # what the sampled tokens depend on besides the weights
MAX_FULL_DIGEST_BYTES = 1 << 24  # a larger file is sampled
HEAD_BYTES = 1 << 18  # of a sampled file: it has the header
SAMPLES, SAMPLE_BYTES = 16, 1 << 12


def identity(files: ModelFiles) -> dict[str, str]:
    """Return a digest of each file that exists; all weight files have one together, whatever their names are.

    The digest of a large file covers its size, its beginning and 16 samples of its content.
    """
    candidates = [] if files.format == "gguf" else [files.path / name for name in DIGESTED_FILES]
    found = {file.name: _digest(file) for file in candidates if file.is_file()}
    if files.weights:
        found[WEIGHTS] = sha256("".join(map(_digest, files.weights)).encode()).hexdigest()
    return found


def _digest(file: Path) -> str:
    try:
        size = file.stat().st_size
        digest = sha256(size.to_bytes(8, "little"))
        with open_regular(file) as source:
            digest.update(source.read(size if size <= MAX_FULL_DIGEST_BYTES else HEAD_BYTES))
            for i in range(1, SAMPLES + 1) if size > MAX_FULL_DIGEST_BYTES else ():
                source.seek((size - SAMPLE_BYTES) * i // SAMPLES)
                digest.update(source.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def same_tokens(one: ModelFiles, other: ModelFiles) -> bool:
    """Return whether the smaller vocabulary is part of the larger one, with the same ids; False if the files do not show it.

    Vocabularies are often padded, so models with the same tokenizer may differ in vocab_size.
    """
    fewer, more = sorted((_tokens(one), _tokens(other)), key=len)
    return bool(fewer) and fewer.items() <= more.items()


def _tokens(files: ModelFiles) -> dict[int, str]:
    """Return the tokens by id; empty if the tokenizer's file is broken, which is an error when the tokenizer is loaded."""
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
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return {}
