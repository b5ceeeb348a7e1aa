"""The lines of a batch: read from a file within limits, checked, and written as OpenAI's output lines.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {}}, "error": null}

A line that no route was called for has `"response": null` and an `error` with code, message and line number.
"""

import asyncio
import hashlib
import secrets
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from quire.serve.limits import LIMITS
from quire.types.errors import ConfigError

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/score", "/v1/score", "/rerank",
    "/v1/rerank", "/v2/rerank", "/pooling", "/classify", "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
MAX_CUSTOM_ID_CHARS = 512
MAX_LINE_BYTES = LIMITS.media_body_bytes + 2**16  # a body, and what stands around it
READ_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
# characters that JSON may contain, and at which some readers end a line
_LINE_ENDS = tuple((mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\u0085\u2028\u2029")


class LineError(Exception):
    """A line that no route is called for. `custom_id` is None if the line has none."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


@dataclass(frozen=True)
class BatchLine:
    custom_id: str
    url: str
    body: bytes  # JSON


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: Any = None
    background: Any = None
    priority: Any = None


_line_decoder, _body_decoder = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Body)
_encoder = msgspec.json.Encoder()


def read_line(raw: bytes | None, endpoint: str | None = None, least_priority: int | None = None) -> BatchLine:
    """Return the checked line. Raise LineError if its route cannot be called.

    raw: None if the line is too long
    endpoint: the URL that the line must have; None: any
    least_priority: the line's own `priority` orders lines among each other only; it is raised to at least this value
    """
    if raw is None:
        raise LineError("line_too_long", f"a line may have at most {MAX_LINE_BYTES} bytes; this one has more")
    try:
        line = _line_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json", f"a line must be a JSON object: {_short(error)}") from None
    custom_id = line.custom_id
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("missing_custom_id", f"custom_id must be a non-empty string; got {custom_id!r:.80}")
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise LineError("invalid_custom_id", f"custom_id may have at most {MAX_CUSTOM_ID_CHARS} characters")
    if line.method != "POST":
        raise LineError("invalid_method", f'method must be "POST"; got {line.method!r:.80}', custom_id)
    if line.url not in PATHS:
        raise LineError("invalid_url", f"url must be one of {', '.join(PATHS)}; got {line.url!r:.80}", custom_id)
    if endpoint is not None and line.url != endpoint:
        raise LineError("mismatched_url", f"url must be the batch's endpoint {endpoint}; got {line.url}", custom_id)
    try:
        body = _body_decoder.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_body", f"body must be a JSON object: {_short(error)}", custom_id) from None
    for name in ("stream", "background"):
        if getattr(body, name):
            raise LineError("unsupported_value", f"body.{name} must be false in a batch. Leave it out", custom_id)
    content = bytes(line.body)
    if least_priority is not None and body.priority is not None:
        content = _with_priority(content, body.priority, least_priority)
    return BatchLine(custom_id, line.url, content)


def _with_priority(body: bytes, priority: Any, least: int) -> bytes:
    if not isinstance(priority, int):
        return body  # which the route refuses
    changed: dict[str, Any] = msgspec.json.decode(body)
    changed["priority"] = least + min(max(priority, 0), least)
    return _encoder.encode(changed)


def _short(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


# ---- output lines


def new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def answer_line(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the output line of an answered request. body: JSON in UTF-8."""
    if b"\n" in body:
        body = _encoder.encode(msgspec.json.decode(body))
    head = b'{"id":"%s","custom_id":%s,"response":{"status_code":%d,"request_id":"%s","body":' % (
        line_id.encode(), _encode(custom_id), status, request_id.encode(),
    )  # fmt: skip
    return head + without_line_ends(body) + b'},"error":null}\n'


def error_line(number: int, error: LineError) -> bytes:
    """Return the output line of a request that was not made. number: of the input line, from 1 on."""
    custom_id = b"null" if error.custom_id is None else _encode(error.custom_id)
    details = _encode({"code": error.code, "message": error.message, "line": number})
    return b'{"id":"%s","custom_id":%s,"response":null,"error":%s}\n' % (new_id().encode(), custom_id, details)


def _encode(value: Any) -> bytes:
    return without_line_ends(_encoder.encode(value))


def without_line_ends(encoded: bytes) -> bytes:
    for mark, escaped in _LINE_ENDS:
        if mark in encoded:
            encoded = encoded.replace(mark, escaped)
    return encoded


# ---- reading files


async def read_lines(file: BinaryIO, most: int = MAX_LINE_BYTES) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Yield the number, from 1 on, and the content of every line that is not blank. Content is None if it has more than `most`
    bytes; such a line is not held in memory."""
    number, rest, skipping = 1, b"", False
    while chunk := await asyncio.to_thread(file.read, READ_BYTES):
        *complete, rest = (rest + chunk).split(b"\n")
        for raw in complete:
            content = None if skipping or len(raw) > most else _stripped(raw, number)
            if content is None or content:
                yield number, content
            number, skipping = number + 1, False
        if len(rest) > most or skipping:
            rest, skipping = b"", True
    last = None if skipping else _stripped(rest, number)
    if last is None or last:
        yield number, last


def _stripped(raw: bytes, number: int) -> bytes:
    return (raw.removeprefix(_BOM) if number == 1 else raw).strip()


def count_lines(file: BinaryIO, most: int) -> int:
    """Return the number of lines that are not blank; counting ends after `most`."""
    count, blank = 0, True
    while chunk := file.read(READ_BYTES):
        pieces = chunk.split(b"\n")
        for i, piece in enumerate(pieces):
            blank = blank and not piece.strip()
            if i < len(pieces) - 1:
                count, blank = count + (not blank), True
        if count > most:
            return count
    return count + (not blank)


# ---- which lines are done


class IdSet:
    """A set of strings for millions of members: 8 bytes of a hash for each, in an open table that is at most half full.

    Two different strings are taken for equal with a probability of n² / 2**65 for n members: 3e-6 for ten million.
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 1024))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, member: str) -> bool:
        return self._count > 0 and self._table[self._find(_hash(member))] != 0

    def add(self, member: str) -> bool:
        """Return whether the member is new."""
        key = _hash(member)
        place = self._find(key)
        if self._table[place]:
            return False
        self._table[place] = key
        self._count += 1
        if 2 * self._count > len(self._table):
            self._grow()
        return True

    def _find(self, key: int) -> int:
        """Return the index of the key, or of the free entry that it would take."""
        table, mask = self._table, len(self._table) - 1
        place = key & mask
        while table[place] and table[place] != key:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        old = self._table
        self._table = array("Q", bytes(16 * len(old)))
        for key in old:
            if key:
                self._table[self._find(key)] = key


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


class _Error(msgspec.Struct):
    line: int = 0


class _Response(msgspec.Struct):
    status_code: int


class _Done(msgspec.Struct):
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_done_decoder = msgspec.json.Decoder(_Done)


class Done:
    """The lines that an output file answers: by custom_id, and by number those without an answer of a route."""

    def __init__(self) -> None:
        self.ids, self.numbers = IdSet(), IdSet()
        self.completed = self.failed = 0

    def covers(self, number: int, custom_id: str | None) -> bool:
        return str(number) in self.numbers or (custom_id is not None and custom_id in self.ids)

    def read(self, file: BinaryIO, name: str) -> None:
        """Add the lines of an output file, and cut it after its last complete line. Raise ConfigError if it is another file."""
        end = number = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            number, end = number + 1, end + len(raw)
            if not raw.strip():
                continue
            try:
                done = _done_decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                raise ConfigError(f"{name} line {number} is not the output of a batch; give another file") from None
            self.add(done)
        file.truncate(end)

    def add(self, done: _Done) -> None:
        if done.error is not None:
            self.numbers.add(str(done.error.line))
        elif done.custom_id is not None:
            self.ids.add(done.custom_id)
        if done.response is not None and done.response.status_code == 200:
            self.completed += 1
        else:
            self.failed += 1
