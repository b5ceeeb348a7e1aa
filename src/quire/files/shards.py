"""GGUF models cut into several files: `name-00001-of-00003.gguf`."""

import re
from pathlib import Path

from quire.types.errors import ModelError

_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


def gguf_shards(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` is a part of, in order; just `path` when it is whole."""
    match = _SHARD.match(path.name)
    if match is None:
        return (path,)
    stem, count = match["stem"], int(match["count"])
    paths = tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise ModelError(f"{path.parent}: {len(missing)} of {count} GGUF shards are missing: {', '.join(missing)}")
    return paths


def shard_pattern(name: str) -> str:
    """A file name pattern that matches `name` and its sibling shards."""
    match = _SHARD.match(name)
    return name if match is None else f"{match['stem']}-*-of-{match['count']}.gguf"


def whole_models(paths: list[Path]) -> list[tuple[Path, ...]]:
    """Group GGUF files into models. Image encoders (`mmproj`) lie beside models, but are none."""
    models = []
    for path in sorted(path for path in paths if "mmproj" not in path.name.lower()):
        match = _SHARD.match(path.name)
        if match is None or int(match["number"]) == 1:
            models.append(gguf_shards(path))
    return models
