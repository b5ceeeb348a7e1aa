"""`vllm.envs`: the variables that Quire reads, with their defaults; others as text, if they are set."""

import os
from collections.abc import Callable
from typing import Any


def _switch(text: str) -> bool:
    return text not in ("", "0")


_VARIABLES: dict[str, tuple[Callable[[str], Any], Any]] = {
    "VLLM_API_KEY": (str, None),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": (_switch, False),
    "VLLM_BATCH_INVARIANT": (_switch, False),
    "VLLM_LOGGING_CONFIG_PATH": (str, None),
    "VLLM_LOGGING_LEVEL": (str, "INFO"),
    "VLLM_LOG_STATS_INTERVAL": (float, 10.0),
    "VLLM_LORA_RESOLVER_CACHE_DIR": (str, None),
    "VLLM_MAX_STOP_STRINGS": (int, 4),
    "VLLM_PLUGINS": (lambda text: text.split(","), None),
    "VLLM_PP_LAYER_PARTITION": (str, None),
    "VLLM_SERVER_DEV_MODE": (_switch, False),
    "VLLM_TORCH_PROFILER_DIR": (str, None),
    "VLLM_USE_V1": (_switch, True),
}


def __getattr__(name: str) -> Any:
    read, default = _VARIABLES.get(name, (str, None))
    if (text := os.environ.get(name)) is not None and name.startswith("VLLM_"):
        return read(text)
    if name in _VARIABLES:
        return default
    raise AttributeError(f"vllm.envs.{name} is not built in Quire, which reads no such variable")


def __dir__() -> list[str]:
    return sorted(_VARIABLES)
