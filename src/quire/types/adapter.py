"""LoRA adapters: the user's request, and the reference that is sent to the engine."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire.types.errors import InvalidParameter, NotSupported


@dataclass(frozen=True, eq=False)
class LoRARequest:
    """The adapter of a request. Two requests with the same name mean the same adapter; after a load with `load_inplace` the
    name means the new one."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for field, kind, called in (
            ("lora_name", str, "a string"), ("lora_int_id", int, "an integer"), ("lora_path", str, "a string"),
            ("load_inplace", bool, "true or false"),
        ):  # fmt: skip
            value = getattr(self, field)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise InvalidParameter(f"{field} must be {called}, got {value!r}", field)
        if not self.lora_name:
            raise InvalidParameter("lora_name must not be empty", "lora_name")
        if self.lora_int_id < 1:
            raise InvalidParameter(f"lora_int_id must be 1 or more, got {self.lora_int_id}", "lora_int_id")
        if not self.lora_path:
            raise InvalidParameter("lora_path must name the adapter's directory", "lora_path")
        if self.tensorizer_config_dict is not None:
            raise NotSupported(
                "tensorizer_config_dict is not supported: adapters are read from PEFT's files at lora_path",
                "tensorizer_config_dict",
            )

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


@dataclass(frozen=True)
class AdapterRef:
    """One version of an adapter. `version` is the digest of its files (`files.adapter.digest`): equal versions have equal
    weights, whatever their names, so cached keys and values depend on the version only."""

    key: int  # lora_int_id
    version: str
    path: str  # its directory
    added: int = 0  # tokens that it adds to the vocabulary
    stamp: str = dataclasses.field(default="", compare=False)  # of the files: while it is the same, so is their digest


@dataclass(frozen=True)
class AdapterFacts:
    """Facts of an adapter that was loaded."""

    rank: int  # the largest of its matrices
    bytes: int  # in host memory and on the device
