"""Reading multipart/form-data: one file, which goes to the disk as it comes, and short fields.

The body is read in the client's chunks. Memory holds at most one of them, and what is not written yet.
"""

import asyncio
import re
from collections.abc import AsyncIterable, Iterator
from typing import BinaryIO

from quire.serve.errors import HttpError

MAX_PART_HEADER_BYTES = 8 * 2**10
MAX_FIELD_BYTES = 64 * 2**10  # of all fields together
MAX_PARTS = 32
MAX_FILENAME_CHARS = 255
WRITE_BYTES = 2**20
FILE = "file"  # the field that is the file

_BOUNDARY = re.compile(r'^multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))(?![^\s;,])', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s;]+))', re.IGNORECASE)
_UNSEEN = re.compile(r"[\x00-\x1f\x7f]")


def bad(message: str, parameter: str | None = None) -> HttpError:
    return HttpError(400, message, parameter)


class Multipart:
    """A parser that is fed with chunks. It yields (name, filename) where a part begins, its content in pieces, and None at its
    end."""

    def __init__(self, content_type: str) -> None:
        match = _BOUNDARY.match(content_type)
        if match is None:
            raise bad(f"the content type must be multipart/form-data with a boundary; got {content_type!r:.80}", "content-type")
        self._delimiter = b"\r\n--" + (match[1] or match[2]).encode()
        self._data = bytearray(b"\r\n")  # the first boundary has no line end before it
        self._in_part = False
        self._parts = 0
        self.complete = False

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str | None] | bytes | None]:
        self._data += chunk
        while not self.complete:
            if self._in_part:
                at = self._data.find(self._delimiter)
                keep = len(self._delimiter) - 1 if at < 0 else 0
                end = max(0, len(self._data) - keep) if at < 0 else at
                if end:
                    yield bytes(self._data[:end])
                    del self._data[:end]
                if at < 0:
                    return
                yield None
                self._in_part = False
            else:
                begun = self._begin()
                if begun is None:
                    return
                if not self.complete:
                    yield begun
        self._data.clear()  # an epilogue

    def _begin(self) -> tuple[str, str | None] | None:
        """Return name and filename of the next part; None: more input is necessary, or nothing follows."""
        at = self._data.find(self._delimiter)
        start = at + len(self._delimiter)
        if at >= 0 and self._data[start : start + 2] == b"--":
            self.complete = True
            return None
        end = -1 if at < 0 else self._data.find(b"\r\n\r\n", start)
        if end < 0:
            if len(self._data) > MAX_PART_HEADER_BYTES:
                raise bad(f"a part must begin with a boundary and at most {MAX_PART_HEADER_BYTES} bytes of headers", "body")
            return None
        if end - start > MAX_PART_HEADER_BYTES:
            raise bad(f"a part may have at most {MAX_PART_HEADER_BYTES} bytes of headers", "body")
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise bad(f"a form may have at most {MAX_PARTS} parts", "body")
        head = bytes(self._data[start:end]).decode(errors="replace")
        del self._data[: end + 4]
        self._in_part = True
        return _names_of(head)


def _names_of(head: str) -> tuple[str, str | None]:
    line = next((line for line in head.split("\r\n") if line.lower().startswith("content-disposition:")), "")
    found = {key.lower(): (quoted if quoted or not token else token) for key, quoted, token in _PARAMETER.findall(line)}
    if "name" not in found:
        raise bad("every part of the form must have a name in its Content-Disposition", "body")
    return found["name"], found.get("filename")


def safe_filename(name: str | None) -> str:
    """Return the last component of a client's file name, without control characters. It is shown, and never a path."""
    last = re.split(r"[/\\]", name or "")[-1]
    return _UNSEEN.sub("", last)[-MAX_FILENAME_CHARS:] or "upload.jsonl"


class Upload:
    """Receives a form. `filename` is None until its file has begun."""

    def __init__(self, content_type: str, target: BinaryIO, most: int) -> None:
        """most: bytes that the file may have"""
        self._parser, self._target, self._most = Multipart(content_type), target, most
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.bytes = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._field_bytes = 0
        self._name, self._value = "", bytearray()
        self._in_file = False

    async def receive(self, chunks: AsyncIterable[bytes]) -> None:
        async for chunk in chunks:
            for event in self._parser.feed(chunk):
                self._take(event)
            if self._waiting_bytes >= WRITE_BYTES:
                await self._write()
        await self._write()
        if not self._parser.complete:
            raise bad("the form ends before its last boundary", "body")
        if self.filename is None:
            raise bad("the form has no file: send the field file", FILE)

    def _take(self, event: tuple[str, str | None] | bytes | None) -> None:
        if isinstance(event, tuple):
            self._name, filename = event
            self._in_file = self._name == FILE
            if self._in_file and self.filename is not None:
                raise bad("the form has more than one file", FILE)
            if self._in_file:
                self.filename = safe_filename(filename)
            self._value.clear()
        elif event is None:
            if not self._in_file:
                self.fields[self._name] = self._value.decode(errors="replace")
        elif self._in_file:
            self.bytes += len(event)
            if self.bytes > self._most:
                raise HttpError(413, f"the file may have at most {self._most} bytes", FILE)
            self._waiting.append(event)
            self._waiting_bytes += len(event)
        else:
            self._field_bytes += len(event)
            if self._field_bytes > MAX_FIELD_BYTES:
                raise HttpError(413, f"the fields of the form may have at most {MAX_FIELD_BYTES} bytes", self._name[:80])
            self._value += event

    async def _write(self) -> None:
        data, self._waiting, self._waiting_bytes = b"".join(self._waiting), [], 0
        if data:
            await asyncio.to_thread(self._target.write, data)
