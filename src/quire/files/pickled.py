"""Names and shapes of the tensors in a file of torch.save, without torch, and without running anything that is in it: the few
operations that torch writes are followed as data. Whatever else there is, the file is left to who reads it whole."""

import pickletools
import struct
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

LARGEST = 1 << 20  # bytes of the table, and of the archive's directory: more takes time to look at
LARGEST_SIZE = 1 << 62
LONGEST_SHAPE = 8
LONGEST_NAME = 100  # of what a file would have called
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Named(NamedTuple):
    """What a file would have called."""

    name: str


class _Shape(NamedTuple):
    sizes: tuple[int, ...]


class _Unknown(ValueError):
    pass


def read_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """By the tensors' names; None = it is not a table of tensors as torch writes it, or a vast one."""
    try:
        with _Bounded(path) as file, ZipFile(file) as archive:
            [entry] = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if entry.file_size > LARGEST or entry.compress_type != ZIP_STORED:
                return None
            table = _follow(archive.read(entry))
    except (OSError, BadZipFile, ValueError, LookupError, EOFError, RuntimeError, struct.error):
        return None
    if not isinstance(table, dict) or not all(isinstance(found, _Shape) for found in table.values()):
        return None
    return {name: found.sizes for name, found in table.items()}


class _Bounded(FileIO):
    """An archive's directory and its entries say themselves how large they are, and may be as large as the file."""

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(LARGEST + 1 if size is None or size < 0 else min(size, LARGEST + 1)) or b""
        if len(found) > LARGEST:
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
            if not all(isinstance(part, str) and len(part) <= LONGEST_NAME for part in (module, called)):
                raise _Unknown  # a few bytes can name what takes forever to write out
            stack.append(_Named(f"{module} {called}"))
        case "TUPLE":
            stack.append(tuple(_taken(stack, marks.pop())))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(_taken(stack, len(stack) - _TUPLES[name])))
        case "BINPERSID":
            stack[-1] = None  # numbers that lie elsewhere
        case "REDUCE":
            called, given = _taken(stack, len(stack) - 2)
            stack.append(_call(called, given))
        case "BUILD":
            stack.pop()  # what else is said of a table
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
            if len(given[2]) > LONGEST_SHAPE or not all(type(size) is int and 0 <= size < LARGEST_SIZE for size in given[2]):
                raise _Unknown
            return _Shape(given[2])
        case "torch._utils _rebuild_parameter" if given and isinstance(given[0], _Shape):
            return given[0]
    raise _Unknown
