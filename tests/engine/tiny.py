"""Engines around the tiny model."""

from pathlib import Path

from quire import LLM
from quire.features.media.store import PREFIX
from tiny_model import TEXT, make_model

__all__ = ["TEXT", "make_model", "open_model", "shared_files"]


def open_model(directory: Path, **args) -> LLM:
    defaults = {
        "device": "cpu",
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 4 << 20,
    }
    return LLM(str(directory), **(defaults | args))


def shared_files() -> set[Path]:
    """What engines could leave in shared memory. Tests of media, in another process of the run, have folders there."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith(PREFIX)}
