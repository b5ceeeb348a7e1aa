"""Who knows adapters that were not loaded: asked when a request names a model that the server does not have.

A resolver is a class with `async def resolve_lora(self, base_model_name, lora_name)`, which gives a LoRARequest or None. Other
packages bring theirs under the entry point group `quire.lora_resolvers`; --lora-resolver says which are asked. The one for a
folder is built in.
"""

import asyncio
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from quire.files.adapter import CONFIG
from quire.types.adapter import LoRARequest
from quire.types.errors import ConfigError

GROUP = "quire.lora_resolvers"
LONGEST_NAME = 255


class LoRAResolver(Protocol):
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None: ...


class FolderResolver:
    """DIRECTORY/NAME is the adapter NAME. Names that lead elsewhere are nobody's."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory).expanduser().absolute()
        if not self._directory.is_dir():
            raise ConfigError(f"lora_resolver_dir {directory!r} is not a directory")

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:  # noqa: ARG002
        if not lora_name or len(lora_name) > LONGEST_NAME or "\0" in lora_name or ".." in Path(lora_name).parts:
            return None
        found = await asyncio.to_thread(self._find, lora_name)
        return None if found is None else LoRARequest(lora_name, 1, str(found))

    def _find(self, name: str) -> Path | None:
        path = self._directory / name
        try:
            inside = path.resolve().is_relative_to(self._directory.resolve()) and path.resolve() != self._directory.resolve()
            return path if inside and (path / CONFIG).is_file() else None
        except (OSError, RuntimeError):  # RuntimeError: links lead in a circle
            return None


def make_resolvers(names: Sequence[str], directory: str | None) -> list[LoRAResolver]:
    found: list[LoRAResolver] = [] if directory is None else [FolderResolver(directory)]
    brought = {point.name: point for point in entry_points(group=GROUP)}
    for name in names:
        if name not in brought:
            there = ", ".join(sorted(brought)) or "none"
            raise ConfigError(
                f"lora_resolver: no installed package brings {name!r} (entry point group {GROUP}); there is {there}"
            )
        try:
            resolver = brought[name].load()()
        except Exception as error:
            raise ConfigError(f"lora_resolver {name!r} cannot be used: {type(error).__name__}: {error}") from error
        if not callable(getattr(resolver, "resolve_lora", None)):
            raise ConfigError(f"lora_resolver {name!r} cannot be used: it has no resolve_lora")
        found.append(resolver)
    return found
