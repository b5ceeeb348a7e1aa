"""--lora-modules: adapters that a server has from its start, as name=path or as JSON with name, path and base_model_name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.types.errors import ConfigError
from quire.types.json_text import read_json

_KEYS = ("name", "path", "base_model_name")


@dataclass(frozen=True)
class LoRAModule:
    name: str
    path: str
    base_model_name: str | None = None


def read_modules(values: Sequence[str | Mapping[str, Any]]) -> list[LoRAModule]:
    modules = [_read(value) for value in values]
    for module in modules:
        if sum(other.name == module.name for other in modules) > 1:
            raise ConfigError(f"lora_modules: there are two adapters {module.name!r}; give each a name of its own")
    return modules


def _read(value: str | Mapping[str, Any]) -> LoRAModule:
    given: Any = value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            given = read_json(value)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {value!r} is not JSON ({error})") from None
    elif isinstance(value, str):
        name, separator, path = value.partition("=")
        if not separator:
            raise ConfigError(f"lora_modules: {value!r} is neither name=path nor a JSON object")
        given = {"name": name, "path": path}
    if unknown := set(given) - set(_KEYS):
        told = ", ".join(sorted(map(str, unknown)))
        raise ConfigError(f"lora_modules: unknown {told} in {value!r}; known are {', '.join(_KEYS)}")
    for key in ("name", "path"):
        if not isinstance(given.get(key), str) or not given[key].strip():
            raise ConfigError(f"lora_modules: {value!r} has no {key}; write name=path, or JSON with name and path")
    return LoRAModule(given["name"], given["path"], given.get("base_model_name"))
