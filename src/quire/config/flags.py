"""Fields become command-line flags: one per field, and a hidden one for every name that is only a hint or is refused."""

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from quire.config.fields import FLAG, LIST, LISTS, NAMES, OBJECT, TEXT, Kind, ordered_fields, spec_of
from quire.config.vllm_arguments import REPLACED_VALUES
from quire.types.json_text import read_json


def add_flags(parser: argparse.ArgumentParser, owner: type, title: str) -> None:
    """One flag per field of a dataclass made of `setting`s. Only what was given ends up in the namespace."""
    groups: dict[str, Any] = {}
    for field in ordered_fields(owner):
        spec = spec_of(field)
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(f"{title}: {spec.group}")
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
        if spec.kind is FLAG:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": _reader(spec.kind.parse), "metavar": spec.kind.metavar}
            if spec.choices:
                options["metavar"] = f"{{{','.join(spec.choices)}}}"
                if field.name not in REPLACED_VALUES:  # otherwise they are checked with the other values, in one place
                    options["choices"] = spec.choices
            if spec.kind is NAMES:
                options["nargs"] = "+"
            if spec.kind in LISTS:
                options |= {"nargs": "+", "action": "extend"}
        groups[spec.group].add_argument(flag_of(field.name), *([spec.short] if spec.short else []), **options)


def add_hidden_flags(
    parser: argparse.ArgumentParser, kinds: Mapping[str, Kind], short: Mapping[str, str], taken: Collection[str] = ()
) -> None:
    """Add flags that help does not show, for hints and refused arguments. taken: names that another part of the command has."""
    for name, kind in kinds.items():
        if name in taken:
            continue
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if kind is FLAG:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": read_untyped}
            options |= {"nargs": "+", "action": "extend"} if kind is LIST else {"nargs": "?", "const": True}
        parser.add_argument(flag_of(name), *([short[name]] if name in short else []), **options)


def kind_of(harmless: tuple[Any, ...]) -> Kind:
    """Return the kind of a value by its harmless values."""
    first = harmless[0] if harmless else None
    return FLAG if isinstance(first, bool) else OBJECT if isinstance(first, dict) else LIST if isinstance(first, list) else TEXT


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


def read_untyped(text: str) -> Any:
    """Read a value of unknown kind: as JSON if it is JSON, so that 1 is a number and {} an object."""
    try:
        return read_json(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
