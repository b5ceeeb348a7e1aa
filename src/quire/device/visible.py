"""Which GPUs a process is to see, as its environment says. Asks no GPU, and does not import torch."""

import os
from itertools import takewhile

from quire.types.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"  # environment


def named_gpus() -> list[str]:
    """Those that this process is to see, none where it is not said. Raises ConfigError where one is named twice: CUDA would see
    none at all, and `auto` be a CPU."""
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")]
    named = list(takewhile(lambda name: name and not name.startswith("-"), names))  # CUDA reads no further
    if len(set(named)) < len(named):
        raise ConfigError(
            f"{VISIBLE}={','.join(names)} names a GPU twice, and CUDA sees none then; name each once. Engines of "
            "data_parallel_size share GPUs where kv_cache_memory_bytes says how much of one each takes"
        )
    return named
