"""Formats by name: the built-in ones, and those that plugins add.

A plugin calls `register_format(name, Format(...))`, in a Python file that the user names or in a package that has an entry
point in the group `quire.parsers`. "auto" is found by the markers in the model's chat template.
"""

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from quire.config import plugins
from quire.config.plugins import PlugIn
from quire.text.parse.format import Format
from quire.text.parse.formats import BUILT_IN, SUFFIXED
from quire.types.errors import ConfigError

Use = Literal["tool calls", "reasoning"]

_formats: dict[str, Format] = dict(BUILT_IN)


def register_format(name: str, form: Format) -> None:
    """Makes a format known by a name; one that was known by it before is replaced."""
    if not isinstance(form, Format):
        raise ConfigError(f"the format {name!r} must be a Format, got {type(form).__name__}")
    if not name or name == "auto":
        raise ConfigError(f"a format cannot be called {name!r}")
    _formats[name] = form


def load_plugins(files: Iterable[str], require: bool = False) -> None:
    """Load the formats of packages and of these files. require: a package that fails is an error, too, as a file is."""
    plugins.load_plugins(plugins.PARSERS, _take, require)
    for name in files:
        path = Path(name).expanduser()
        spec = importlib.util.spec_from_file_location(f"quire_plugin_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError(f"the parser plugin {name!r} is not a Python file")
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:
            raise ConfigError(f"the parser plugin {name!r} failed: {error!r}") from error


def _take(plugin: PlugIn, found: Any) -> None:
    """An entry point is a Format, which gets its name, or a function that registers what it likes."""
    if isinstance(found, Format):
        register_format(plugin.name, found)
    else:
        plugin.run(found)


def names(use: Use) -> list[str]:
    return sorted(name for name, form in _formats.items() if _fits(form, use))


def find_format(name: str, use: Use, suffix: str = "") -> Format:
    """`suffix`: of the model's marks, for formats that have one."""
    form = _formats.get(name)
    if suffix and name in SUFFIXED and form == BUILT_IN[name]:
        form = SUFFIXED[name](suffix)
    if form is not None and _fits(form, use):
        return form
    near = difflib.get_close_matches(name, names(use), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"there is no parser {name!r} for {use}{hint}. Known: auto, {', '.join(names(use))}")


def detect(template: str | Mapping[str, str] | None, use: Use) -> str | None:
    """The name of the format whose markers the chat template has."""
    text = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
    for name, form in _formats.items():
        marks = form.in_template if use == "tool calls" else _reasoning_marks(form)
        if _fits(form, use) and marks and all(mark in text for mark in marks):
            return name
    return None


def _fits(form: Format, use: Use) -> bool:
    return form.channels is not None or (bool(form.calls) if use == "tool calls" else form.thinking is not None)


def _reasoning_marks(form: Format) -> tuple[str, ...]:
    """Families with reasoning of their own are recognized by their tools' markers too."""
    if form.channels is not None:
        return form.in_template
    return () if form.thinking is None or not form.in_template else (*form.in_template, form.thinking.end[0])
