"""Fields become command-line flags: one per field, and one hidden flag for every name that is refused with a reason."""

import argparse
import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from quire.config.fields import FLAG, LIST, NAMES, spec_of


def add_flags(parser: argparse.ArgumentParser, owner: type, title: str) -> None:
    """One flag per field of a dataclass made of `setting`s. Only what was given ends up in the namespace."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        spec = spec_of(field)
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(f"{title}: {spec.group}")
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
        if spec.kind is FLAG:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": _reader(spec.kind.parse), "metavar": spec.kind.metavar}
            if spec.choices:
                options |= {"choices": spec.choices, "metavar": None}
            if spec.kind is NAMES:
                options["nargs"] = "+"
            if spec.kind is LIST:
                options |= {"nargs": "+", "action": "extend"}
        groups[spec.group].add_argument(flag_of(field.name), **options)


def add_refused_flags(
    parser: argparse.ArgumentParser, names: Iterable[str], short: Mapping[str, str], taken: Collection[str] = ()
) -> None:
    """Flags that are known so that they can be refused with a reason, except those that somebody else has `taken`."""
    for name in names:
        if name in taken:
            continue
        flags = [flag_of(name), short[name]] if name in short else [flag_of(name)]
        parser.add_argument(
            *flags, dest=name, nargs="?", const=True, type=_loose, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(field: "dataclasses.Field[Any]") -> str:
    default = field.default
    if default is dataclasses.MISSING or default is None or default == "":
        return spec_of(field).help.replace("%", "%%")
    shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
    return f"{spec_of(field).help} (default: {shown})".replace("%", "%%")


def _reader(parse: Any) -> Any:
    """argparse shows the message of an ArgumentTypeError only."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _loose(text: str) -> Any:
    """A value of a refused flag: JSON where it is JSON, so that 1 is a number and {} an object."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
