"""What makes a tiny checkpoint of a family."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Alias:
    """An architecture whose code is in model repositories, and never run: one of transformers' under other names."""

    architecture: str
    config: Callable[[dict[str, Any]], dict[str, Any]]
    tensors: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Family:
    config: str  # class name in transformers
    model: str  # class name in transformers (or repository_models.py), the architecture of the checkpoint
    settings: dict[str, Any] = field(default_factory=dict)  # over TINY; None removes a setting, ... says None
    text: str | None = None  # where those are of a nested text model: its model_type, and
    around: dict[str, Any] = field(default_factory=dict)  # the settings around it
    alias: Alias | None = None  # what the checkpoint is rewritten as
    settle: Callable[[Any], None] | None = None  # what is done to the model's weights before they are saved

    @property
    def architecture(self) -> str:
        return self.model if self.alias is None else self.alias.architecture
