"""What tells one checkpoint from another: small files are read whole, of large ones the size, the beginning and some pieces."""

from hashlib import sha256
from pathlib import Path

from quire.files.reading import open_regular
from quire.files.resolve import ModelFiles
from quire.types.errors import ModelError

WEIGHTS = "weights"
BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "params.json", "tekken.json",
    "quant_config.json", "quantize_config.json", "hf_quant_config.json",
)  # fmt: skip  # what tokens depend on besides
WHOLE = 1 << 24  # bytes of a file that is read whole
BEGINNING = 1 << 18  # bytes: headers
PIECES, PIECE = 16, 1 << 12


def identity(files: ModelFiles) -> dict[str, str]:
    """A digest for each file that is there; weights have one together, whatever their files are called."""
    beside = [] if files.format == "gguf" else [files.path / name for name in BESIDE]
    found = {file.name: _digest(file) for file in beside if file.is_file()}
    if files.weights:
        found[WEIGHTS] = sha256("".join(map(_digest, files.weights)).encode()).hexdigest()
    return found


def _digest(file: Path) -> str:
    try:
        size = file.stat().st_size
        digest = sha256(size.to_bytes(8, "little"))
        with open_regular(file) as source:
            digest.update(source.read(size if size <= WHOLE else BEGINNING))
            for i in range(1, PIECES + 1) if size > WHOLE else ():
                source.seek((size - PIECE) * i // PIECES)
                digest.update(source.read(PIECE))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
