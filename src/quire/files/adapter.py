"""The files of a LoRA adapter, as PEFT writes them: a directory of adapter_config.json and the numbers beside it."""

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
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is there where there is a tokenizer
BESIDE = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja")
HALF = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight$")
MIXTURE = re.compile("expert|moe|(input|output)_linear")
LAYER = re.compile(r"\.\d+\.")  # embedding and head, which may grow, have none
FLOATS = ("F32", "F16", "BF16", "F8_E4M3")
MAX_CONFIG_BYTES = 4 << 20  # the names of 46,000 modules have about 2 MB
ADAPTER_LIMITS = HeaderLimits(bytes=32 << 20, tensors=1 << 17)  # of any model: two halves for each of 60,000 experts
TENSORS_PER_MATRIX = 16  # lora_A, lora_B, biases, magnitude, copies of PEFT's; a checkpoint may store several matrices as one
MIN_TENSORS = 4096  # that an adapter may have, however small its model is
HEADER_BYTES_PER_TENSOR = 512  # name, dtype, shape and offsets take 150 to 250
METADATA_BYTES = 1 << 20
LARGEST_BESIDE = 256 << 20
LARGEST_NUMBER = 8  # bytes
PART = 1 << 22  # bytes that a thread reads at once, and hashes alone
SETTLED = 0.1  # seconds: a file that was written more recently may be written again without its times telling


_own = local()  # of a thread: memory to read into


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
    except (OSError, ValueError) as error:  # a null character in it, among others
        raise AdapterError(f"{path!r}: cannot be read: {error}", "lora_path") from error
    raise AdapterError(f"{path}: there is neither {WEIGHTS[0]} nor {WEIGHTS[1]} in it", "lora_path")


def read_config(files: AdapterFiles) -> dict[str, Any]:
    try:
        return read_object(files.config, max_bytes=MAX_CONFIG_BYTES) or {}
    except ModelError as error:
        raise AdapterError(str(error), "lora_path") from error


@dataclass(frozen=True)
class AdapterBounds:
    """What is known of an adapter before any is read. `numbers`: that it can have; None = who knows."""

    numbers: int | None = None
    max_rank: int | None = None
    checkpoint: tuple[Path, ...] = ()  # files of the model's own
    matrices: int | None = None  # of the model, each expert's counted; None = unknown

    @property
    def header(self) -> HeaderLimits:
        """The limits of an adapter's header, by the number of matrices that there are to add to."""
        if self.matrices is None:
            return ADAPTER_LIMITS
        tensors = min(max(TENSORS_PER_MATRIX * self.matrices, MIN_TENSORS), ADAPTER_LIMITS.tensors)
        return HeaderLimits(min(METADATA_BYTES + HEADER_BYTES_PER_TENSOR * tensors, ADAPTER_LIMITS.bytes), tensors)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the matrices of floats that layers have in the checkpoint, by its own names."""
        found: dict[str, tuple[int, ...]] = {}
        for file in self.checkpoint:
            with suppress(ModelError, OSError):  # it may be gone by now, or have another format
                for name, info in read_header(file).items():
                    if len(info.shape) == 2 and info.dtype in FLOATS and LAYER.search(name):
                        found[name.removesuffix(".weight")] = info.shape
        return found


def check_header(path: str, bounds: AdapterBounds) -> None:
    """Raises what is wrong with the header, or with how much there is to read: a look that takes no time, before one that takes
    longer the larger the files are. What it does not know is left to who reads them."""
    files = find_adapter(path)
    weights = files.weights
    try:
        size = weights.stat().st_size
        header = read_header(weights, bounds.header) if weights.suffix == ".safetensors" else None
        for file in _all(files):
            if file != weights and file.stat().st_size > LARGEST_BESIDE:
                raise AdapterError(f"{file}: is larger than {LARGEST_BESIDE >> 20} MiB, which none needs to be", "lora_path")
    except (ModelError, OSError) as error:
        raise AdapterError(str(error), "lora_path") from error
    most = bounds.numbers
    if header is None:
        numbers = (size - bounds.header.bytes) // LARGEST_NUMBER
        _check_shapes(path, read_shapes(weights) or {}, bounds)
    else:
        numbers = sum(info.elements for info in header.values())
        if size > sum(info.nbytes for info in header.values()) + 8 + bounds.header.bytes:
            raise AdapterError(f"{weights}: has {size:,} bytes, and tensors for few of them", "lora_path")
        _check_shapes(path, {name: info.shape for name, info in header.items()}, bounds)
    if most is not None and numbers > most:
        raise AdapterError(
            f"{weights}: has {numbers:,} numbers, where an adapter of this model up to max_lora_rank has {most:,} at most",
            "lora_path",
        )


def too_wide(rank: int, most: int) -> str:
    return f"max_lora_rank is {most}; start with --max-lora-rank {rank}"


def _check_shapes(path: str, shapes: Mapping[str, tuple[int, ...]], bounds: AdapterBounds) -> None:
    """Of low-rank halves: their rank, and their size for layers that the checkpoint has under the same name. Some families
    store them the other way."""
    for name, shape in shapes.items():
        half = HALF.match(name)
        if half is None:
            continue
        own = bounds.shapes.get(half["module"])
        rank, side = (shape if half["half"] == "A" else shape[::-1]) if len(shape) == 2 else (0, 0)
        if own is None and MIXTURE.search(half["module"]):  # those of all its experts may be in one matrix
            continue
        if own is not None and side not in own:
            raise AdapterError(
                f"{path}: tensor {shown(name)} has shape {list(shape)}, where the model's matrix is {own[0]} x {own[1]}",
                "lora_path",
            )
        if bounds.max_rank is not None and rank > bounds.max_rank:
            wide = f"tensor {shown(name)} has rank {rank}; {too_wide(rank, bounds.max_rank)}"
            raise AdapterError(f"{path}: {wide}", "lora_path")


def has_tokenizer(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in TOKENIZER)


def count_added(path: str, vocabulary: int) -> int:
    """Tokens that its embedding and head have beyond the model's, by the file's header. Whether it can be run with them is
    found out where it is read: nothing else may have whole matrices."""
    weights = find_adapter(path).weights
    try:
        header = read_header(weights, ADAPTER_LIMITS) if weights.suffix == ".safetensors" else {}
    except (ModelError, OSError):
        return 0  # who reads it says what is wrong
    whole = [info.shape for name, info in header.items() if name.endswith(".weight") and "lora_" not in name]
    return max((shape[0] - vocabulary for shape in whole if len(shape) == 2 and shape[0] > vocabulary), default=0)


def _all(files: AdapterFiles) -> list[Path]:
    """What a version is made of."""
    beside = (files.config.parent / name for name in (*TOKENIZER, *BESIDE))
    return [files.config, files.weights, *(file for file in beside if file.is_file())]


def digest(path: str, gone: Callable[[], bool] = bool) -> str:
    """The version of what is in the files now. Files may be large: who does not wait for it any more is `gone`."""
    files, found = find_adapter(path), sha256(b"quire adapter")
    try:
        for file in _all(files):
            with open_regular(file) as source:
                size = os.fstat(source.fileno()).st_size
                found.update(file.name.encode())
                found.update(size.to_bytes(8, "little"))
                part = partial(_digest_of, source.fileno(), lambda: _stay(file, gone))  # noqa: B023
                found.update(b"".join(in_threads(part, range(0, size, PART))))
    except OSError as error:
        raise AdapterError(f"{file}: cannot be read: {error.strerror or error}", "lora_path") from error
    return found.hexdigest()


def _digest_of(source: int, stay: Callable[[], None], begin: int) -> bytes:
    stay()
    if not hasattr(_own, "room"):
        _own.room = memoryview(bytearray(PART))
    return sha256(_own.room[: os.preadv(source, [_own.room], begin)]).digest()


def _stay(file: Path, gone: Callable[[], bool]) -> None:
    if gone():
        raise EngineDead(f"{file}: nobody waits for it any more")


def stamp(path: str) -> str:
    """Size, place and time of the files: as long as it is the same, so is the digest. Empty if it does not tell, because they
    are too new."""
    told, settled = look_at(path)
    return told if settled else ""


def look_at(path: str) -> tuple[str, bool]:
    """Size, place and time of the files, and whether these will tell if the files are written again. If they differ from what
    they were, somebody has touched the files, too new or not."""
    files, told, newest = find_adapter(path), list[str](), 0
    try:
        for file in _all(files):
            found = file.stat()
            newest = max(newest, found.st_mtime_ns, found.st_ctime_ns)
            told.append(f"{found.st_dev}.{found.st_ino}.{found.st_size}.{found.st_mtime_ns}.{found.st_ctime_ns}")
    except OSError as error:
        raise AdapterError(f"{file}: cannot be read: {error.strerror or error}", "lora_path") from error
    return " ".join(told), newest + SETTLED * 1e9 < time.time_ns()
