"""Weights from safetensors files: one, or shards with an index."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.files.safetensors import read_header
from quire.types.errors import ModelError

INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """`files`: the weight files found beside the configuration in `directory`."""

    def __init__(self, directory: Path, files: tuple[Path, ...]) -> None:
        index = directory / INDEX
        self.index = _read_index(index) if index.is_file() else None
        shards = [path for path in files if path.suffix == ".safetensors"]
        if self.index is not None:
            shards = _indexed(directory, set(self.index.values()))
        elif not shards:
            raise ModelError(f"{directory}: there are no .safetensors files")
        else:
            _check_complete(directory, shards)
        self.files = shards

    @cached_property
    def _found(self) -> Mapping[str, tuple[Path, tuple[int, ...]]]:
        found: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for path in self.files:
            for name, info in read_header(path).items():
                if name in found:
                    raise ModelError(f"tensor {name!r} is in both {found[name][0]} and {path}")
                found[name] = (path, info.shape)
        if self.index is not None:
            absent = [name for name, file in self.index.items() if name not in found or found[name][0].name != file]
            if absent:
                name = min(absent)
                raise ModelError(f"{self.index[name]} lacks {name!r}, which {INDEX} promises ({len(absent)} such tensors)")
        return found

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in self._found.items()}

    def read(self, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        for path in self.files:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in file.offset_keys():
                        if name in names:
                            yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: cannot be read as safetensors: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        weights = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weights.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a safetensors index: {error!r}") from error


def _indexed(directory: Path, wanted: set[str]) -> list[Path]:
    missing = sorted(name for name in wanted if not (directory / name).is_file())
    if missing:
        raise ModelError(f"{directory}: {len(missing)} of {len(wanted)} shards are missing: {', '.join(missing[:10])}")
    extra = sorted(path.name for path in directory.glob("model-*-of-*.safetensors") if path.name not in wanted)
    if extra:
        raise ModelError(f"{directory}: {INDEX} does not know the shards {', '.join(extra[:10])}; are they of another model?")
    return [directory / name for name in sorted(wanted)]


def _check_complete(directory: Path, files: list[Path]) -> None:
    """Without an index, the shards' own numbering says how many there must be."""
    totals = {total for path in files if (total := _shard_total(path.name))}
    for total in totals:
        of_total = [path.name for path in files if _shard_total(path.name) == total]
        if len(totals) > 1 or len(of_total) != total:
            raise ModelError(f"{directory}: {len(of_total)} of {total} shards are there: {', '.join(sorted(of_total)[:10])}")


def _shard_total(name: str) -> int | None:
    match = re.search(r"-\d+-of-(\d+)\.safetensors$", name)
    return int(match[1]) if match else None
