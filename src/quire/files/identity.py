"""Compare checkpoints by their files: digests that tell two checkpoints from each other, and equal vocabularies."""

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from quire.files.gguf import GGUFTensor, read_gguf
from quire.files.reading import open_regular, read_object
from quire.files.resolve import ModelFiles
from quire.files.safetensors import TensorInfo, read_header
from quire.files.threads import in_threads
from quire.types.errors import ModelError

WEIGHTS = "weights"
DIGESTED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "params.json", "tekken.json",
    "quant_config.json", "quantize_config.json", "hf_quant_config.json",
)  # fmt: skip  # what the sampled tokens depend on besides the weights
MAX_FULL_DIGEST_BYTES = 1 << 24  # a larger file is sampled
HEAD_BYTES = 1 << 18  # of a sampled file: it has the header
SAMPLES, SAMPLE_BYTES = 16, 1 << 12  # at equal distances in a file
MAX_TENSOR_SAMPLES, TENSOR_SAMPLE_BYTES = 1 << 12, 1 << 9  # of all weight files, one in the middle of a tensor


def identity(files: ModelFiles) -> dict[str, str]:
    """Return a digest of each file that exists; all weight files have one together, whatever their names are.

    The digest of a large file covers its size, its beginning, 16 samples at equal distances, and a sample of each tensor, if
    the model has no more than MAX_TENSOR_SAMPLES tensors: models that differ in one matrix then have different digests.
    """
    candidates = [] if files.format == "gguf" else [files.path / name for name in DIGESTED_FILES]
    found = {file.name: _digest(file) for file in candidates if file.is_file()}
    if files.weights:
        digests = in_threads(partial(_digest, samples=MAX_TENSOR_SAMPLES // len(files.weights)), files.weights)
        found[WEIGHTS] = sha256("".join(digests).encode()).hexdigest()
    return found


def _digest(file: Path, samples: int = 0) -> str:
    """samples: of tensors, at most."""
    try:
        size = file.stat().st_size
        digest = sha256(size.to_bytes(8, "little"))
        with open_regular(file) as source:
            digest.update(source.read(size if size <= MAX_FULL_DIGEST_BYTES else HEAD_BYTES))
            for start, count in _sampled_ranges(file, size, samples) if size > MAX_FULL_DIGEST_BYTES else ():
                source.seek(start)
                digest.update(source.read(count))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _sampled_ranges(file: Path, size: int, samples: int) -> Iterable[tuple[int, int]]:
    """Yield the first byte and the length of each sample."""
    for i in range(1, SAMPLES + 1):
        yield (size - SAMPLE_BYTES) * i // SAMPLES, SAMPLE_BYTES
    tensors = _tensors(file) if samples else ()
    for i in range(min(samples, len(tensors))):
        tensor = tensors[i * len(tensors) // min(samples, len(tensors))]
        count = min(tensor.nbytes, TENSOR_SAMPLE_BYTES)
        yield tensor.offset + (tensor.nbytes - count) // 2, count


def _tensors(file: Path) -> Sequence[TensorInfo | GGUFTensor]:
    """Return the tensors of a file in the order of their offsets; none if its format has no header."""
    if file.suffix == ".safetensors":
        tensors: Iterable[TensorInfo | GGUFTensor] = read_header(file).values()
    elif file.suffix == ".gguf":
        tensors = read_gguf(file).tensors.values()
    else:
        return ()
    return sorted(tensors, key=lambda tensor: tensor.offset)


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
