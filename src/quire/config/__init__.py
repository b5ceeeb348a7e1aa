"""The user's arguments and the model's facts, resolved once into a frozen `Config`.

This package reads headers and JSON. It does not import torch, and no package below the engine receives a Config.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`quire.config` stands for `vllm.config`, too: the classes that programs annotate with are fetched on first use."""
    if name not in ("ModelConfig", "VllmConfig"):
        raise AttributeError(f"module 'quire.config' has no attribute {name!r}")
    return getattr(import_module("quire.config.model_config"), name)
