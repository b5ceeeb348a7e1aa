"""Flags with dots: `--compilation-config.mode 3` is `--compilation-config '{"mode": 3}'`, and leaves other keys alone.

`--flag.a.b VALUE` nests, `--flag.list+ VALUE` adds to a list; a value is JSON where it is JSON, else text; no value means true.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.config.flags import read_loosely

Found = dict[str, dict[str, Any]]  # by flag


def take_dotted(args: Sequence[str], flags: Collection[str]) -> tuple[list[str], Found]:
    """The arguments without those that are keys of `flags`, and what these say."""
    rest: list[str] = []
    found: Found = {}
    texts = iter(range(len(args)))
    for i in texts:
        flag, dot, key = args[i].partition(".")
        if args[i] == "--":
            rest += args[i:]
            break
        if not dot or flag not in flags:
            rest.append(args[i])
            continue
        key, equals, text = key.partition("=")
        if not equals:
            text = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else "true"
            if i + 1 < len(args) and not args[i + 1].startswith("--"):
                next(texts)
        _put(found.setdefault(flag, {}), key.split("."), read_loosely(text))
    return rest, found


def merged(old: Any, new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` over `old`, key by key; lists that were added to go on."""
    out = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        name = key.removesuffix("+")
        if key.endswith("+"):
            before = out.get(name)
            out[name] = [*(before if isinstance(before, list) else []), *value]
        else:
            out[name] = merged(out.get(name), value) if isinstance(value, Mapping) else value
    return out


def _put(where: dict[str, Any], path: list[str], value: Any) -> None:
    *above, last = path
    for key in above:
        below = where.get(key)
        where[key] = where = below if isinstance(below, dict) else {}
    if last.endswith("+"):
        where.setdefault(last, []).append(value)
    else:
        where[last] = value
