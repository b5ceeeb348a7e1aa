"""Pages on disk: append-only segments of checked records, of one rank of one model.

    PATH/secret                              keys all digests; readable by the owner only
    PATH/<fingerprint>/lane-0/00000003.kv    a segment; the fingerprint covers model, weights, types, layout, rank

    record   [ magic | name | length | tag | digest of the content | digest of these fields ] [ content ]

A record is named by a keyed digest of its page's key, so nothing about prompts can be read off names, and no file can be made
without the secret. The fingerprint is part of the digests, so a file of another model or rank is not read. A store has a
lane of its own, which it locks; several engines have several lanes, and the next start takes a free one with all that is
in it. Segments only grow, or are removed as a whole: a record that was cut off, by a kill or a full disk, is not found, and
one whose bits have changed is not returned. Files of others are left alone.

Errors of the disk never reach the caller: what cannot be written or read is not there.
"""

import fcntl
import logging
import os
import re
import shutil
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path

from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)
MAGIC = b"QUIREKV1"
REMOVED = b"QUIREKV0"  # in place of MAGIC, in a record that is not there any more
SECRET_BYTES = NAME_BYTES = DIGEST_BYTES = 32
TAG_BYTES = 16
FIELDS = struct.Struct(f"<8s{NAME_BYTES}sQ{TAG_BYTES}s{DIGEST_BYTES}s")
HEADER_BYTES = FIELDS.size + DIGEST_BYTES
SEGMENTS = 16  # that the size is divided into
MAX_SEGMENT_BYTES = 1 << 30
MAX_LANES = 256
RETRY_S = 30.0  # after a write that failed
SHARE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
SEGMENT_NAME = re.compile(r"(\d{8})\.kv")


class Segment:
    """An open file, closed when nothing refers to it any more."""

    def __init__(self, directory: int, number: int, create: bool) -> None:
        """directory: its descriptor. If it was deleted, files are not made in another one of that name."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        self.file = -1
        self.name, self.number = f"{number:08d}.kv", number
        self.file = os.open(self.name, flags, 0o600, dir_fd=directory)
        self.size = os.fstat(self.file).st_size
        self.names: set[bytes] = set()

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


class DiskStore:
    def __init__(
        self,
        path: Path,
        fingerprint: str,
        max_bytes: int,
        least_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes: of the segments of this store. least_bytes: of the content of the largest record. Raises
        ConfigError if the path or the size cannot be used.
        """
        self._clock, self._max, self._limit = clock, max_bytes, min(MAX_SEGMENT_BYTES, max(1, max_bytes // SEGMENTS))
        self._mutex = threading.Lock()
        try:
            _make_directory(path)
            self._check_size(path, least_bytes + HEADER_BYTES)
            self.secret = _read_secret(path / "secret")
            base = path / fingerprint
            _make_directory(base)
            self._lane, self._lock = _claim_lane(base)
            self._directory = os.open(self._lane, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"kv_disk_path {path} cannot be used: {error.strerror or error}. Give a directory that this user can write to, "
                "on a disk with space"
            ) from None
        self._key = blake2b(fingerprint.encode(), key=self.secret).digest()  # of digests
        self._index: dict[bytes, tuple[Segment, int]] = {}  # name -> segment, position of the record
        self._segments: OrderedDict[int, Segment] = OrderedDict()  # by number; used longest ago first
        self._open: Segment | None = None  # what is written to
        self._pause_until = 0.0
        self._warned = False
        self._numbers = self._scan()

    @property
    def names(self) -> list[bytes]:
        with self._mutex:
            return list(self._index)

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    def put(self, name: bytes, tag: bytes, content: memoryview) -> tuple[bool, list[bytes]]:
        """Write a record. Return whether it is there now, and the names of records that were removed for it.

        tag: 16 bytes that `get` returns
        """
        with self._mutex:
            if name in self._index:
                return True, []
            if self._clock() < self._pause_until:
                return False, []
        digest = blake2b(content, key=self._key, digest_size=DIGEST_BYTES).digest()
        fields = FIELDS.pack(MAGIC, name, len(content), tag, digest)
        header = fields + self._header_digest(fields)
        with self._mutex:
            length = HEADER_BYTES + len(content)
            if length > self._max:
                return False, []
            removed = self._make_room(length)
            try:
                segment = self._writable(length)
                self._append(segment, header, content)
            except OSError as error:
                self._fail_write(error)
                return False, removed
            self._index[name] = segment, segment.size
            segment.names.add(name)
            segment.size += length
            return True, removed

    def get(self, name: bytes, content: memoryview) -> bytes | None:
        """Read a record's content; return its tag, or None if it is not there or wrong."""
        with self._mutex:
            found = self._index.get(name)
            if found is None:
                return None
            segment, position = found
            self._segments.move_to_end(segment.number)
        tag = self._read(segment, position, name, content)
        if tag is None:
            with self._mutex:
                if self._index.get(name) == found:
                    del self._index[name]
                    segment.names.discard(name)
        return tag

    def remove(self, name: bytes) -> None:
        """Remove one record, also for the next start."""
        with self._mutex:
            found = self._index.pop(name, None)
            if found is None:
                return
            segment, position = found
            segment.names.discard(name)
            try:
                header = os.pread(segment.file, HEADER_BYTES, position)
                fields = REMOVED + header[len(REMOVED) : FIELDS.size]
                os.pwrite(segment.file, fields + self._header_digest(fields), position)
            except OSError as error:
                self._warn("removed", error)

    def clear(self) -> None:
        """Remove all records."""
        with self._mutex:
            for segment in list(self._segments.values()):
                self._remove(segment)

    def close(self) -> None:
        with self._mutex:
            self._index.clear()
            self._segments.clear()
            self._open = None
            if self._lock >= 0:
                os.close(self._directory)
                os.close(self._lock)
                self._lock = -1

    def _check_size(self, path: Path, least: int) -> None:
        if self._max < least:
            raise ConfigError(f"kv_disk_size gives each rank {self._max} bytes, less than one record of {least}. Raise it")
        disk = shutil.disk_usage(path).total
        if self._max > disk:
            raise ConfigError(
                f"kv_disk_size gives each rank {self._max / 2**30:.2f} GiB, more than the {disk / 2**30:.2f} GiB of the file "
                f"system of {path}. Lower it"
            )

    # ---- segments --------------------------------------------------------------------------------------------------------

    def _scan(self) -> int:
        """Find the records of earlier processes; return the next segment's number."""
        last = 0
        for path in sorted(self._lane.iterdir()):
            match = SEGMENT_NAME.fullmatch(path.name)
            if match is None:
                continue
            number = int(match[1])
            last = max(last, number)
            try:
                segment = Segment(self._directory, number, create=False)
                regular = stat.S_ISREG(os.fstat(segment.file).st_mode)
                if not regular or not _is_ours(os.pread(segment.file, len(MAGIC), 0)):
                    logger.warning("%s is ignored: it is no segment", path)
                    continue
                self._scan_segment(segment)
            except OSError as error:
                logger.warning("%s is ignored: %s", path, error)
                continue
            self._segments[number] = segment
            if not segment.names:  # cut off in its first record, or of another secret
                self._remove(segment)
        while self.size > self._max and self._segments:  # the size was lowered
            self._remove(next(iter(self._segments.values())))
        return last + 1

    def _scan_segment(self, segment: Segment) -> None:
        position = 0
        while position + HEADER_BYTES <= segment.size:
            header = os.pread(segment.file, HEADER_BYTES, position)
            fields, digest = header[: FIELDS.size], header[FIELDS.size :]
            if len(header) < HEADER_BYTES or not compare_digest(digest, self._header_digest(fields)):
                return
            magic, name, length, _, _ = FIELDS.unpack(fields)
            if position + HEADER_BYTES + length > segment.size:
                return
            if magic == MAGIC and name not in self._index:
                self._index[name] = segment, position
                segment.names.add(name)
            position += HEADER_BYTES + length

    def _writable(self, length: int) -> Segment:
        """Return the segment to append to; begin another one if the last is full."""
        if self._open is None or self._open.size + length > max(self._limit, length):
            number = self._numbers
            self._open = self._segments[number] = Segment(self._directory, number, create=True)
            self._numbers += 1
        return self._open

    def _append(self, segment: Segment, header: bytes, content: memoryview) -> None:
        parts, position, left = [memoryview(header), content], segment.size, len(header) + len(content)
        try:
            while left:
                written = os.pwritev(segment.file, parts, position)
                position, left = position + written, left - written
                while parts and written >= len(parts[0]):
                    written -= len(parts.pop(0))
                if parts and written:
                    parts[0] = parts[0][written:]
        except OSError:
            os.ftruncate(segment.file, segment.size)
            raise

    def _make_room(self, length: int) -> list[bytes]:
        removed = list[bytes]()
        while self._segments and self.size + length > self._max:
            removed += self._remove(next(iter(self._segments.values())))
        return removed

    def _remove(self, segment: Segment) -> list[bytes]:
        names = list(segment.names)
        for name in names:
            del self._index[name]
        segment.names.clear()
        del self._segments[segment.number]
        if self._open is segment:
            self._open = None
        try:
            os.unlink(segment.name, dir_fd=self._directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn("removed", error)
        return names

    def _read(self, segment: Segment, position: int, name: bytes, content: memoryview) -> bytes | None:
        try:
            header = os.pread(segment.file, HEADER_BYTES, position)
            if len(header) < HEADER_BYTES:
                return None
            magic, stored, length, tag, digest = FIELDS.unpack(header[: FIELDS.size])
            if (magic, stored, length) != (MAGIC, name, len(content)):
                return None
            done = 0
            while done < length:
                count = os.preadv(segment.file, [content[done:]], position + HEADER_BYTES + done)
                if not count:
                    return None
                done += count
        except OSError as error:
            self._warn("read", error)
            return None
        right = compare_digest(header[FIELDS.size :], self._header_digest(header[: FIELDS.size]))
        right = right and compare_digest(digest, blake2b(content, key=self._key, digest_size=DIGEST_BYTES).digest())
        return bytes(tag) if right else None

    def _header_digest(self, fields: bytes) -> bytes:
        return blake2b(fields, key=self._key, digest_size=DIGEST_BYTES, person=b"header").digest()

    def _fail_write(self, error: OSError) -> None:
        self._pause_until = self._clock() + RETRY_S
        self._open = None  # its directory may be gone
        self._warn("written", error)

    def _warn(self, what: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("pages of the KV cache cannot be %s in %s: %s; this is logged once", what, self._lane, str(error))


def log_others(path: Path, fingerprint: str) -> None:
    """Log that the directory also has pages of other models, versions or arguments."""
    own = fingerprint.partition("-")[0]
    others = [found for found in path.iterdir() if SHARE_NAME.fullmatch(found.name) and not found.name.startswith(own)]
    if others:
        size = sum(file.stat().st_size for other in others for file in other.glob("lane-*/*.kv"))
        logger.info(
            "%s also has %.2f GiB of pages of other models, versions or arguments, which are ignored. Remove what is not used: "
            "%s", path, size / 2**30, ", ".join(sorted(found.name for found in others)),
        )  # fmt: skip


def _is_ours(beginning: bytes) -> bool:
    """Return whether a file begins as a segment, or was cut off there."""
    return MAGIC.startswith(beginning) or REMOVED.startswith(beginning)


def _make_directory(path: Path) -> None:
    """Make a private directory; raise if it belongs to another user or is no directory."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"kv_disk_path: {path} belongs to user {found.st_uid}, who could read or replace pages. Give another directory"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "no permission to write", str(path))


def _read_secret(path: Path) -> bytes:
    """Return the secret, which the first process makes."""
    fresh = path.with_name(f"secret.{os.getpid()}.{threading.get_ident()}")
    if not path.exists():
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, os.urandom(SECRET_BYTES))
            os.link(fresh, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            os.close(file)
            fresh.unlink(missing_ok=True)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found, secret = os.fstat(file), os.read(file, SECRET_BYTES + 1)
    finally:
        os.close(file)
    if found.st_uid != os.geteuid() or len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"kv_disk_path: {path} is not a secret that this user's Quire made. Remove the directory, or give another"
        )
    return secret


def _claim_lane(base: Path) -> tuple[Path, int]:
    """Lock the first lane that no process has."""
    for number in range(MAX_LANES):
        lane = base / f"lane-{number}"
        _make_directory(lane)
        lock = os.open(lane / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return lane, lock
    raise ConfigError(f"kv_disk_path: {MAX_LANES} engines use {base} already. Give another directory")
