"""Classes as arguments: given as a class or as `module:Class`, kept by name, so that arguments can go to other processes."""

from importlib import import_module
from typing import Any

from quire.types.errors import ConfigError

LOCAL = "<local>"
_local: dict[str, type] = {}  # classes that only this process has


def as_name(argument: str, value: Any) -> str:
    """Return `module:Class`. A class of the main program or a function gets a name that only this process knows."""
    if isinstance(value, str):
        module, _, name = value.partition(":")
        if not (module and name) and value not in _local:
            raise ConfigError(f"{argument} must be module:Class; got {value!r}. Write the class after a colon")
        return value
    name = f"{value.__module__}:{value.__qualname__}"
    if value.__module__ != "__main__" and "<locals>" not in value.__qualname__:
        return name
    key = f"{LOCAL}:{name}#{id(value)}"
    _local[key] = value  # which also keeps the id from being used again
    return key


def shown_name(name: str) -> str:
    """Return the name for messages."""
    return name.removeprefix(f"{LOCAL}:").partition("#")[0]


def load_class(argument: str, name: str, base: type) -> type:
    """Return the class of a name. ConfigError: there is none, or it is not a subclass of `base`."""
    if name.startswith(LOCAL) and name not in _local:
        raise ConfigError(
            f"{argument}: {shown_name(name)} is defined in the main program or in a function, so other processes cannot import "
            "it. Move it to a module"
        )
    try:
        found: Any = _local.get(name) or _import(name)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ConfigError(f"it is not a subclass of {base.__name__}")
    except Exception as error:
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{argument}: {shown_name(name)} cannot be used: {why}") from error
    return found


def _import(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        import_module("quire.compat").install()  # the class is written for vLLM, which is not installed
        found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
