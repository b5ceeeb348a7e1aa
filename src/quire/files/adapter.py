"""The files of a LoRA adapter, as PEFT writes them: a directory with adapter_config.json and the weights."""

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from threading import local
from typing import Any

from quire.files.pickled import read_shapes
from quire.files.reading import open_regular, read_object, shown
from quire.files.safetensors import HeaderLimits, read_header
from quire.files.threads import in_threads
from quire.types.errors import AdapterError, EngineDead, ModelError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")  # an adapter with its own tokenizer has one of them
TEXT_FILES = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja")
HALF = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight$")
EXPERTS = re.compile("expert|moe|(input|output)_linear")
LAYER = re.compile(r"\.\d+\.")  # embedding and head, to which tokens may be added, have none
FLOATS = ("F32", "F16", "BF16", "F8_E4M3")
MAX_CONFIG_BYTES = 4 << 20  # the names of 46,000 modules take about 2 MB
ADAPTER_LIMITS = HeaderLimits(bytes=32 << 20, tensors=1 << 17)  # of any model: A and B of each of 60,000 experts
TENSORS_PER_MATRIX = 16  # lora_A, lora_B, biases, magnitude, copies of PEFT's; a checkpoint may store several matrices as one
MIN_TENSORS = 4096  # that an adapter may have, however small the model is
HEADER_BYTES_PER_TENSOR = 512  # name, dtype, shape and offsets take 150 to 250
METADATA_BYTES = 1 << 20
MAX_TEXT_FILE_BYTES = 256 << 20
MAX_VALUE_BYTES = 8
CHUNK_BYTES = 1 << 22  # that a thread reads and hashes
STABLE_AGE_S = 0.1  # a file that was written more recently may be written again without a change of its times


_thread = local()  # .buffer: memory of a thread to read into


@dataclass(frozen=True)
class AdapterFiles:
    config: Path
    weights: Path


def find_adapter(path: str) -> AdapterFiles:
    directory = Path(path)
    try:
        if not directory.is_dir():
            raise AdapterError(f"{path}: there is no such directory; lora_path names the one with {CONFIG}", "lora_path")
        config = directory / CONFIG
        if not config.is_file():
            raise AdapterError(f"{path}: there is no {CONFIG} in it, as PEFT writes it", "lora_path")
        for name in WEIGHTS:
            if (directory / name).is_file():
                return AdapterFiles(config, directory / name)
    except AdapterError:
        raise
    except (OSError, ValueError) as error:  # a null character in the path, among others
        raise AdapterError(f"{path!r}: cannot be read: {error}", "lora_path") from error
    raise AdapterError(f"{path}: there is neither {WEIGHTS[0]} nor {WEIGHTS[1]} in it", "lora_path")


def read_config(files: AdapterFiles) -> dict[str, Any]:
    try:
        return read_object(files.config, max_bytes=MAX_CONFIG_BYTES) or {}
    except ModelError as error:
        raise AdapterError(str(error), "lora_path") from error


@dataclass(frozen=True)
class AdapterBounds:
    """Upper limits of any adapter of the model.

    values: weights that an adapter can have; None = unknown
    checkpoint: the model's own weight files
    matrices: of the model, those of each expert counted; None = unknown
    """

    values: int | None = None
    max_rank: int | None = None
    checkpoint: tuple[Path, ...] = ()
    matrices: int | None = None

    @property
    def header(self) -> HeaderLimits:
        """The limits of an adapter's header, which follow from the number of matrices of the model."""
        if self.matrices is None:
            return ADAPTER_LIMITS
        tensors = min(max(TENSORS_PER_MATRIX * self.matrices, MIN_TENSORS), ADAPTER_LIMITS.tensors)
        return HeaderLimits(min(METADATA_BYTES + HEADER_BYTES_PER_TENSOR * tensors, ADAPTER_LIMITS.bytes), tensors)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the layers' float matrices in the checkpoint, by their names in it."""
        found: dict[str, tuple[int, ...]] = {}
        for file in self.checkpoint:
            with suppress(ModelError, OSError):  # deleted meanwhile, or of another format
                for name, info in read_header(file).items():
                    if len(info.shape) == 2 and info.dtype in FLOATS and LAYER.search(name):
                        found[name.removesuffix(".weight")] = info.shape
        return found


def check_header(path: str, bounds: AdapterBounds) -> None:
    """Raise AdapterError if the header or the sizes of the files are wrong: a fast check before the files are read.

    What cannot be seen in a header is checked when the adapter is loaded.
    """
    files = find_adapter(path)
    weights = files.weights
    try:
        size = weights.stat().st_size
        header = read_header(weights, bounds.header) if weights.suffix == ".safetensors" else None
        for file in _all(files):
            if file != weights and file.stat().st_size > MAX_TEXT_FILE_BYTES:
                raise AdapterError(f"{file}: must have at most {MAX_TEXT_FILE_BYTES >> 20} MiB", "lora_path")
    except (ModelError, OSError) as error:
        raise AdapterError(str(error), "lora_path") from error
    max_values = bounds.values
    if header is None:
        values = (size - bounds.header.bytes) // MAX_VALUE_BYTES
        _check_shapes(path, read_shapes(weights) or {}, bounds)
    else:
        values = sum(info.elements for info in header.values())
        if size > sum(info.nbytes for info in header.values()) + 8 + bounds.header.bytes:
            raise AdapterError(f"{weights}: has {size:,} bytes, more than its tensors need", "lora_path")
        _check_shapes(path, {name: info.shape for name, info in header.items()}, bounds)
    if max_values is not None and values > max_values:
        raise AdapterError(
            f"{weights}: has {values:,} values; an adapter of this model up to max_lora_rank has at most {max_values:,}",
            "lora_path",
        )


def rank_problem(rank: int, max_rank: int) -> str:
    return f"has rank {rank}; max_lora_rank is {max_rank}; start with --max-lora-rank {rank}"


def _check_shapes(path: str, shapes: Mapping[str, tuple[int, ...]], bounds: AdapterBounds) -> None:
    """Check the rank of A and B, and their size for layers that have the same name in the checkpoint.

    Some families store them transposed.
    """
    for name, shape in shapes.items():
        half = HALF.match(name)
        if half is None:
            continue
        own = bounds.shapes.get(half["module"])
        rank, side = (shape if half["half"] == "A" else shape[::-1]) if len(shape) == 2 else (0, 0)
        if own is None and EXPERTS.search(half["module"]):  # one tensor may hold the matrices of all experts
            continue
        if own is not None and side not in own:
            raise AdapterError(
                f"{path}: tensor {shown(name)} has shape {list(shape)}, but the model's matrix is {own[0]} x {own[1]}",
                "lora_path",
            )
        if bounds.max_rank is not None and rank > bounds.max_rank:
            problem = rank_problem(rank, bounds.max_rank)
            raise AdapterError(f"{path}: tensor {shown(name)} {problem}", "lora_path")


def has_tokenizer(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in TOKENIZER)


def count_added(path: str, vocabulary: int) -> int:
    """Return how many tokens an adapter's embedding and head have beyond the model's, by the header of its weights.

    Whether the adapter can run with them is checked when it is loaded.
    """
    weights = find_adapter(path).weights
    try:
        header = read_header(weights, ADAPTER_LIMITS) if weights.suffix == ".safetensors" else {}
    except (ModelError, OSError):
        return 0  # loading the adapter reports the error
    whole = [info.shape for name, info in header.items() if name.endswith(".weight") and "lora_" not in name]
    return max((shape[0] - vocabulary for shape in whole if len(shape) == 2 and shape[0] > vocabulary), default=0)


def _all(files: AdapterFiles) -> list[Path]:
    """Return the files that enter the version of an adapter."""
    texts = (files.config.parent / name for name in (*TOKENIZER, *TEXT_FILES))
    return [files.config, files.weights, *(file for file in texts if file.is_file())]


def digest(path: str, gone: Callable[[], bool] = bool) -> str:
    """Return the version of an adapter: the digest of its files.

    gone: returns True when the caller no longer waits; the files may be large, so it is asked for every chunk
    """
    files, found = find_adapter(path), sha256(b"quire adapter")
    try:
        for file in _all(files):
            with open_regular(file) as source:
                size = os.fstat(source.fileno()).st_size
                found.update(file.name.encode())
                found.update(size.to_bytes(8, "little"))
                part = partial(_digest_of, source.fileno(), lambda: _check_awaited(file, gone))  # noqa: B023
                found.update(b"".join(in_threads(part, range(0, size, CHUNK_BYTES))))
    except OSError as error:
        raise AdapterError(f"{file}: cannot be read: {error.strerror or error}", "lora_path") from error
    return found.hexdigest()


def _digest_of(source: int, check: Callable[[], None], begin: int) -> bytes:
    check()
    if not hasattr(_thread, "buffer"):
        _thread.buffer = memoryview(bytearray(CHUNK_BYTES))
    return sha256(_thread.buffer[: os.preadv(source, [_thread.buffer], begin)]).digest()


def _check_awaited(file: Path, gone: Callable[[], bool]) -> None:
    if gone():
        raise EngineDead(f"{file}: the caller no longer waits for it")


def stamp(path: str) -> str:
    """Return size, inode and times of the files: while the stamp is the same, so is the digest.

    It is empty if the files are so new that equal times prove nothing.
    """
    found, stable = file_stamp(path)
    return found if stable else ""


def file_stamp(path: str) -> tuple[str, bool]:
    """Return size, inode and times of the files, and whether a later write is sure to change them.

    A stamp that differs from an earlier one always means that the files were touched.
    """
    files, stamps, newest = find_adapter(path), list[str](), 0
    try:
        for file in _all(files):
            found = file.stat()
            newest = max(newest, found.st_mtime_ns, found.st_ctime_ns)
            stamps.append(f"{found.st_dev}.{found.st_ino}.{found.st_size}.{found.st_mtime_ns}.{found.st_ctime_ns}")
    except OSError as error:
        raise AdapterError(f"{file}: cannot be read: {error.strerror or error}", "lora_path") from error
    return " ".join(stamps), newest + STABLE_AGE_S * 1e9 < time.time_ns()
