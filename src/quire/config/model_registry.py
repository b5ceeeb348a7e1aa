"""vLLM's `ModelRegistry`: model classes by architecture, for programs and general plug-ins. It is `quire.ModelRegistry`."""

from collections.abc import Mapping, Set

from quire.config.families import architectures, class_path, register
from quire.config.families.card import Card
from quire.types.errors import ConfigError

_SCRIPT = "__main__"  # its classes are known in this process only
_classes: dict[str, str] = {}  # architecture -> "module:Class", as registered in this process


class ModelRegistry:
    @staticmethod
    def get_supported_archs() -> Set[str]:
        """Return the architectures that Quire, plug-ins and this process have classes for."""
        return architectures().keys()

    @staticmethod
    def register_model(model_arch: str, model_cls: str | type) -> None:
        """Serve an architecture by a class: a subclass of `quire.models.decoder.Decoder`, or its "module:Class".

        config.json must have the common field names; a family with names of its own or GGUF files needs a `Card`. Engine
        processes import the class by its module. Raise ConfigError if the architecture has another class.
        """
        if not isinstance(model_arch, str) or not model_arch:
            raise ConfigError(f"model_arch must be the name of an architecture; got {model_arch!r}")
        if not isinstance(model_cls, str | type):
            raise ConfigError(f"model_cls must be a class or 'module:Class'; got {model_cls!r}")
        target = model_cls if isinstance(model_cls, str) else f"{model_cls.__module__}:{model_cls.__qualname__}"
        known = architectures().get(model_arch)
        if known is None or class_path(known) != target:
            register(Card(model_arch, "dense", target, (model_arch,), {}))
            _classes[model_arch] = target


def share_classes(given: Mapping[str, str]) -> dict[str, str]:
    """Register these classes by architecture, and return them with those that were registered here before.

    An engine argument carries them to the processes of the engine.
    """
    for architecture, target in given.items():
        if not isinstance(target, str):
            raise ConfigError(f"model_classes must have 'module:Class' for each architecture; got {target!r}")
        ModelRegistry.register_model(architecture, target)
    return {name: target for name, target in _classes.items() if target.partition(":")[0] != _SCRIPT}
