"""Find the classes of logits processors, and check requests by them. Runs in engine processes."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.config.classes import load_class, shown_name
from quire.config.plugins import LOGITS_PROCESSORS, PlugIn, find_plugins, load_plugins
from quire.features.logits_processors.host import NAME, has_processors
from quire.features.logits_processors.interface import LogitsProcessor
from quire.types.errors import PLUGIN_FAILURES, ConfigError, InvalidParameter, NotSupported
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.config.config import Config

logger = logging.getLogger(__name__)

Classes = tuple[tuple[str, type[LogitsProcessor]], ...]  # each with its name for messages


def load_classes(names: Sequence[str], require_plugins: bool) -> Classes:
    """Return the classes of packages, then those with these names."""
    plugins = find_plugins(LOGITS_PROCESSORS).values()
    return _load(tuple(names), require_plugins, tuple(f"{plugin.package} {plugin.point}" for plugin in plugins))


@cache
def _load(names: tuple[str, ...], require_plugins: bool, packages: tuple[str, ...]) -> Classes:  # noqa: ARG001 - part of the key
    found: list[tuple[str, type[LogitsProcessor]]] = []

    def take(plugin: PlugIn, loaded: Any) -> None:
        if not (isinstance(loaded, type) and issubclass(loaded, LogitsProcessor)):
            raise ConfigError("it is not a subclass of quire.LogitsProcessor")
        found.append((f"{plugin.name} ({plugin.point.value}, {plugin.package})", loaded))

    load_plugins(LOGITS_PROCESSORS, take, require_plugins)
    found += [(shown_name(name), load_class(NAME, name, LogitsProcessor)) for name in names]
    return tuple(found)


def make_validator(config: "Config") -> Callable[[SamplingParams], None]:
    """Return the check of a request's parameters by all processors."""
    if not has_processors(config):
        if left := find_plugins(LOGITS_PROCESSORS):
            names = ", ".join(map(str, left.values()))
            logger.warning("%s: not used with speculation or pooling models", names)
        return refuse_extra_args
    classes = load_classes(config.args.logits_processors, config.args.require_plugins)

    def validate(params: SamplingParams) -> None:
        for name, each in classes:
            try:
                each.validate_params(params)
            except PLUGIN_FAILURES as error:
                why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise InvalidParameter(f"extra_args: refused by the logits processor {name}: {why}", "extra_args") from error

    return validate if classes else refuse_extra_args


def refuse_extra_args(params: SamplingParams) -> None:
    if params.extra_args:
        raise NotSupported("extra_args requires logits processors, and this engine has none. Remove it", "extra_args")
