"""The description of a user's field: default, help, allowed values, and the conversion from text."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.types.errors import ConfigError
from quire.types.json_text import read_json

_NUMBER = re.compile(r"^(?P<number>\d+(\.\d+)?)(?P<unit>[kKmMgGtT]?)$")
FLOATS = ("half", "float16", "bfloat16", "float", "float32")
FLOAT_NAMES = {"half": "float16", "float": "float32"}  # other spellings
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30, "t": 10**12, "T": 2**40}


@dataclass(frozen=True)
class Kind:
    """A type of value: what is accepted from Python, and how it is read from text."""

    name: str
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Any]
    metavar: str


def read_number(text: str) -> int:
    """An integer with an optional unit: 1k is 1000, 1K is 1024, 2.5m is 2500000."""
    if text in ("auto", "-1"):
        return -1
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not an integer (8192, 8k = 8000, 8K = 8192, ...)")
    value = float(match["number"]) * _UNITS[match["unit"]]
    if value == math.inf:
        raise ValueError(f"{text[:20]}... is too large a number")
    if value != int(value):
        raise ValueError(f"{text!r} is not an integer")
    return int(value)


def read_real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number, such as 4 or 0.5") from None


def read_object(text: str) -> dict[str, Any]:
    try:
        value = read_json(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON ({error}). Write it as '{{\"name\": value}}'") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def read_list(name: str, text: Any) -> list[Any]:
    """Return a list of one word, or of a JSON list, the form that vLLM accepts for some of its lists."""
    if not isinstance(text, str) or not text.startswith("["):
        return [text]
    try:
        value = read_json(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r} is not a JSON list ({error})") from None
    assert isinstance(value, list)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TEXT = Kind("a string", lambda value: isinstance(value, str), str, "TEXT")
NUMBER = Kind("an integer", _is_int, read_number, "N")
REAL = Kind("a number", lambda value: _is_int(value) or isinstance(value, float), read_real, "X")
FLAG = Kind("true or false", lambda value: isinstance(value, bool), str, "")
OBJECT = Kind("a dict", lambda value: isinstance(value, Mapping), read_object, "JSON")
NAMES = Kind(
    "a string or a list of strings",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)),
    str,
    "NAME",
)
LIST = Kind(
    "a list of strings", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), str, "TEXT"
)
MODULES = Kind(
    "a list of name=path or of objects",
    lambda value: isinstance(value, list) and all(isinstance(item, str | Mapping) for item in value),
    str,
    "NAME=PATH",
)
CLASSES = Kind(
    "a list of classes or of module:Class",
    lambda value: isinstance(value, list) and all(isinstance(item, str | type) for item in value),
    str,
    "MODULE:CLASS",
)
CLASS = Kind("a class or module:Class", lambda value: isinstance(value, str | type), str, "MODULE:CLASS")
LISTS = (LIST, MODULES, CLASSES)
TOKEN = Kind("a string, or true for the stored one", lambda value: isinstance(value, str | bool), str, "TOKEN")


@dataclass(frozen=True)
class Spec:
    """The metadata of one field."""

    kind: Kind
    help: str
    group: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    short: str = ""  # its short flag
    after: str = ""  # the field that it follows in help and docs, if it belongs to a feature

    def check(self, name: str, value: Any, optional: bool) -> Any:
        """Return the checked value, or raise ConfigError with the field's name."""
        if value is None and optional:
            return None
        if self.kind is NUMBER and isinstance(value, str):
            try:
                value = read_number(value)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
        if self.kind in LISTS and isinstance(value, list) and len(value) == 1:
            value = read_list(name, value[0])
        if not self.kind.accepts(value):
            raise ConfigError(f"{name} must be {self.kind.name}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number, got {value}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} must be one of {', '.join(self.choices)}; got {value!r}")
        if self.low is not None and value < self.low:
            raise ConfigError(f"{name} must be at least {self.low:g}, got {value}")
        if self.above is not None and not value > self.above:
            raise ConfigError(f"{name} must be above {self.above:g}, got {value}")
        if self.high is not None and not value <= self.high:
            raise ConfigError(f"{name} must be at most {self.high:g}, got {value}")
        return value


def setting(default: Any, kind: Kind, group: str, help: str, **limits: Any) -> Any:  # noqa: A002
    """A dataclass field that carries its Spec."""
    spec = Spec(kind, help, group, **limits)
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=default.copy, metadata={"spec": spec})
    return dataclasses.field(default=default, metadata={"spec": spec})


def ordered_fields(owner: Any) -> "list[dataclasses.Field[Any]]":
    """Return the fields of a dataclass as help and docs show them: those of features stand after the field they name."""
    found = list(dataclasses.fields(owner))
    names = [field.name for field in found if not spec_of(field).after]
    for field in found:
        if after := spec_of(field).after:
            names.insert(names.index(after) + 1, field.name)
    return sorted(found, key=lambda field: names.index(field.name))


def spec_of(field: "dataclasses.Field[Any]") -> Spec:
    spec = field.metadata["spec"]
    assert isinstance(spec, Spec)
    return spec
