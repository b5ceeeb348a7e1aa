"""Read names and shapes of the tensors in a file of torch.save, without torch and without running its pickle.

The few pickle operations that torch writes are interpreted as data. Any other file is reported as unknown.
"""

import pickletools
import struct
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

MAX_TABLE_BYTES = 1 << 20  # of the tensor table, and of the archive's directory: more takes long to parse
MAX_SIZE = 1 << 62
MAX_DIMENSIONS = 8
MAX_NAME_CHARS = 100  # of a function that the file would call
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Named(NamedTuple):
    """A function that the file would call."""

    name: str


class _Shape(NamedTuple):
    sizes: tuple[int, ...]


class _Unknown(ValueError):
    pass


def read_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Return shapes by tensor names; None if the file is not a table of tensors as torch writes it, or too large."""
    try:
        with _Bounded(path) as file, ZipFile(file) as archive:
            [entry] = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if entry.file_size > MAX_TABLE_BYTES or entry.compress_type != ZIP_STORED:
                return None
            table = _follow(archive.read(entry))
    except (OSError, BadZipFile, ValueError, LookupError, EOFError, RuntimeError, struct.error):
        return None
    if not isinstance(table, dict) or not all(isinstance(found, _Shape) for found in table.values()):
        return None
    return {name: found.sizes for name, found in table.items()}


class _Bounded(FileIO):
    """A file with limited reads: an archive's directory and entries declare their own sizes, up to that of the file."""

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(MAX_TABLE_BYTES + 1 if size is None or size < 0 else min(size, MAX_TABLE_BYTES + 1)) or b""
        if len(found) > MAX_TABLE_BYTES:
            raise _Unknown
        return found


def _follow(text: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memory: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(text):
        name = operation.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memory[argument] = stack[-1]
        elif name == "MEMOIZE":
            memory[len(memory)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memory[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "STOP":
            return stack.pop()
        else:
            _make(name, argument, stack, marks)
    raise _Unknown


def _make(name: str, argument: Any, stack: list[Any], marks: list[int]) -> None:
    match name:
        case "PROTO" | "FRAME":
            pass
        case "EMPTY_DICT":
            stack.append({})
        case "EMPTY_LIST":
            stack.append([])
        case "GLOBAL":
            stack.append(_Named(argument))
        case "STACK_GLOBAL":
            module, called = _taken(stack, len(stack) - 2)
            if not all(isinstance(part, str) and len(part) <= MAX_NAME_CHARS for part in (module, called)):
                raise _Unknown  # a few bytes can produce a name that takes very long to print
            stack.append(_Named(f"{module} {called}"))
        case "TUPLE":
            stack.append(tuple(_taken(stack, marks.pop())))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(_taken(stack, len(stack) - _TUPLES[name])))
        case "BINPERSID":
            stack[-1] = None  # values, which are stored in another entry
        case "REDUCE":
            called, given = _taken(stack, len(stack) - 2)
            stack.append(_call(called, given))
        case "BUILD":
            stack.pop()  # attributes of a table
        case "SETITEM" | "SETITEMS":
            items = _taken(stack, len(stack) - 2 if name == "SETITEM" else marks.pop())
            if not isinstance(stack[-1], dict) or len(items) % 2 or not all(isinstance(key, str) for key in items[::2]):
                raise _Unknown
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        case _:
            raise _Unknown


def _taken(stack: list[Any], start: int) -> list[Any]:
    if not 0 <= start <= len(stack):
        raise _Unknown
    found = stack[start:]
    del stack[start:]
    return found


def _call(called: Any, given: Any) -> Any:
    if not isinstance(called, _Named) or not isinstance(given, tuple):
        raise _Unknown
    match called.name:
        case "collections OrderedDict" if not given:
            return {}
        case "torch._utils _rebuild_tensor_v2" if len(given) > 2 and isinstance(given[2], tuple):
            if len(given[2]) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < MAX_SIZE for size in given[2]):
                raise _Unknown
            return _Shape(given[2])
        case "torch._utils _rebuild_parameter" if given and isinstance(given[0], _Shape):
            return given[0]
    raise _Unknown
