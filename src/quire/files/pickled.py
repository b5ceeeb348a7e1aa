"""Read a tensor of torch.save, or names and shapes of those in a file, without torch and without running the pickle.

The few pickle operations that torch writes are interpreted as data. Any other file is reported as unknown.
"""

import math
import pickletools
import struct
from io import BytesIO, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

if TYPE_CHECKING:
    import numpy as np

MAX_TABLE_BYTES = 1 << 20  # of the tensor table, and of the archive's directory: more takes long to parse
MAX_SIZE = 1 << 62
MAX_DIMENSIONS = 8
MAX_NAME_CHARS = 100  # of a function that the file would call
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# kind of storage -> how numpy reads it; bfloat16 has no type there
_STORAGES = {
    "torch FloatStorage": "<f4", "torch DoubleStorage": "<f8", "torch HalfStorage": "<f2", "torch BFloat16Storage": "<u2",
    "torch LongStorage": "<i8", "torch IntStorage": "<i4",
}  # fmt: skip
_BFLOAT16 = "torch BFloat16Storage"
_ERRORS = (OSError, BadZipFile, ValueError, LookupError, EOFError, RuntimeError, struct.error)


class _Named(NamedTuple):
    """A function that the file would call."""

    name: str


class _Storage(NamedTuple):
    kind: str
    entry: str  # of the archive


class _Tensor(NamedTuple):
    sizes: tuple[int, ...]
    storage: _Storage | None
    offset: Any  # of the first element in the storage; not checked
    strides: Any


class _Unknown(ValueError):
    pass


def read_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Return shapes by tensor names; None if the file is not a table of tensors as torch writes it, or too large."""
    try:
        with _Bounded(path) as file, ZipFile(file) as archive:
            table, _ = _read_table(archive)
    except _ERRORS:
        return None
    if not isinstance(table, dict) or not all(isinstance(found, _Tensor) for found in table.values()):
        return None
    return {name: found.sizes for name, found in table.items()}


def read_tensor(data: bytes, most_bytes: int) -> "np.ndarray[Any, Any] | None":
    """Return the tensor that torch.save wrote, bfloat16 as float32; None if the data are anything else, or it is larger."""
    try:
        with ZipFile(BytesIO(data)) as archive:
            tensor, name = _read_table(archive)
            if not isinstance(tensor, _Tensor) or tensor.storage is None:
                return None
            order = name.removesuffix("data.pkl") + "byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                return None
            entry = archive.getinfo(f"{name.removesuffix('data.pkl')}data/{tensor.storage.entry}")
            return _strided(tensor, archive.read(entry), most_bytes) if entry.compress_type == ZIP_STORED else None
    except _ERRORS:
        return None


def _read_table(archive: ZipFile) -> tuple[Any, str]:
    """Return what the archive's pickle describes, and the name of its entry."""
    [entry] = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    if entry.file_size > MAX_TABLE_BYTES or entry.compress_type != ZIP_STORED:
        raise _Unknown
    return _follow(archive.read(entry)), entry.filename


def _strided(tensor: _Tensor, content: bytes, most_bytes: int) -> "np.ndarray[Any, Any]":
    """Return the elements of a tensor in its storage, in order."""
    import numpy as np

    assert tensor.storage is not None
    stored = np.frombuffer(content, _STORAGES[tensor.storage.kind])
    sizes, strides, offset = tensor.sizes, tensor.strides, tensor.offset
    numbers = isinstance(strides, tuple) and len(strides) == len(sizes)
    if not numbers or not all(type(number) is int and 0 <= number < MAX_SIZE for number in (offset, *strides)):
        raise _Unknown
    if math.prod(sizes) * 4 > most_bytes or not math.prod(sizes):
        raise _Unknown
    if offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) >= len(stored):
        raise _Unknown
    steps = [stride * stored.itemsize for stride in strides]
    found = np.ascontiguousarray(np.lib.stride_tricks.as_strided(stored[offset:], sizes, steps)).reshape(sizes)
    return (found.astype(np.uint32) << 16).view(np.float32) if tensor.storage.kind == _BFLOAT16 else found


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
            stack[-1] = _storage(stack[-1])
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
            storage = given[0] if isinstance(given[0], _Storage) else None
            return _Tensor(given[2], storage, given[1], given[3] if len(given) > 3 else None)
        case "torch._utils _rebuild_parameter" if given and isinstance(given[0], _Tensor):
            return given[0]
    raise _Unknown


def _storage(given: Any) -> _Storage | None:
    """Return the storage that a reference names: ("storage", kind, entry, device, elements). None: it is of another form."""
    match given:
        case ("storage", _Named(kind), str(entry), *_) if kind in _STORAGES:
            return _Storage(kind, entry)
    return None
