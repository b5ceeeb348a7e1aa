"""Files and batches on disk, a folder for each tenant. The disk is the only state: any API process can answer any request.

    DIR/lock                              held by the API process that runs batches
    DIR/TENANT/files/file-ID/             content, meta.json: a file exists once it has both
    DIR/TENANT/batches/batch_ID/          batch.json, output and errors while it runs, cancel once that was asked for
    DIR/TENANT/incoming/                  uploads that are not complete

Only the worker changes batch.json after the batch was created; a request to cancel is a file of its own. Records are replaced
by renaming, so a crash leaves the old one or the new one. Ids begin with their time, so a folder's order is that of creation.
Names given by clients are never part of a path.
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from quire.serve.errors import HttpError

OWNER = "default"  # the folder of a server without tenants
STALE_UPLOAD_S = 3600.0
_FILE_ID, _BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
_TENANT = re.compile(r"[0-9a-f]{32}")

R = TypeVar("R")
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True)
class StoreLimits:
    file_bytes: int
    files: int  # of a tenant, and as many batches
    disk_bytes: int  # of all tenants together


class StoredFile(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {"object": "file", "status": "processed", "status_details": None, **msgspec.to_builtins(self)}

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchProblem(msgspec.Struct):
    """Why a batch failed as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_name: str  # ids of the files that the batch will have
    error_name: str
    status: Status = "validating"
    model: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    problems: list[BatchProblem] = msgspec.field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    end: Status = "completed"  # what a batch that is finalizing becomes

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def shown(self, cancelling_at: int | None) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        problems = {"object": "list", "data": msgspec.to_builtins(self.problems)} if self.problems else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": problems,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": "cancelling" if cancelling_at is not None and not self.ended else self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": msgspec.to_builtins(self.counts),
            "metadata": self.metadata,
        }


def new_name(prefix: str) -> str:
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def no_file(name: str) -> HttpError:
    return HttpError(404, f"there is no file {name!r:.80}", "file_id")


class TenantStore:
    def __init__(self, root: Path, tenant: str | None, limits: StoreLimits) -> None:
        self._root, self.tenant, self._limits = root, tenant, limits
        self._own = root / (tenant or OWNER)
        self._files, self._batches = self._own / "files", self._own / "batches"

    # ---- files

    def incoming(self) -> Path:
        """Return the path for a new upload."""
        folder = self._own / "incoming"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / secrets.token_hex(16)

    def room(self) -> int:
        """Return how many bytes may be added. Of several tenants, none may have more than it leaves for the others."""
        left = self._limits.disk_bytes - _size(self._root)
        return max(0, left if self.tenant is None else (left - _size(self._own)) // 2)

    def check_count(self) -> None:
        """Raise the error for another file if there are too many."""
        if len(_names(self._files, _FILE_ID)) >= self._limits.files:
            raise HttpError(409, f"there are {self._limits.files} files, the limit of this server; delete some")

    def add_file(self, content: Path, file: StoredFile) -> None:
        """Make a file of a complete upload, or of the output of a batch. May be called again after a crash."""
        folder = self._files / file.id
        folder.mkdir(parents=True, exist_ok=True)
        if content.exists():
            content.replace(folder / "content")
        file.bytes = (folder / "content").stat().st_size
        _replace(folder / "meta.json", file)
        _sync(self._files)

    def file(self, name: str) -> StoredFile:
        found = self._read_file(name) if _FILE_ID.fullmatch(name) else None
        if found is None or found.expired:
            raise no_file(name)
        return found

    def content(self, name: str) -> Path:
        self.file(name)
        return self._files / name / "content"

    def files(self) -> Iterator[StoredFile]:
        """Yield files, the newest first."""
        for name in reversed(_names(self._files, _FILE_ID)):
            found = self._read_file(name)
            if found is not None and not found.expired:
                yield found

    def delete_file(self, name: str) -> None:
        self.file(name)
        user = next((batch.id for batch in self.batches() if batch.input_file_id == name and not batch.ended), None)
        if user is not None:
            raise HttpError(409, f"file {name} is the input of {user}, which is not done; cancel that batch first", "file_id")
        self._remove(name)

    def remove_expired(self) -> None:
        used = {batch.input_file_id for batch in self.batches() if not batch.ended}
        for name in _names(self._files, _FILE_ID):
            found = self._read_file(name)
            if found is not None and found.expired and name not in used:
                self._remove(name)
        oldest = time.time() - STALE_UPLOAD_S
        for upload in _entries(self._own / "incoming"):
            if upload.stat().st_mtime < oldest:
                Path(upload).unlink(missing_ok=True)

    def input(self, batch: StoredBatch) -> BinaryIO:
        """Open the input of a batch, also if the file has expired meanwhile."""
        return (self._files / batch.input_file_id / "content").open("rb")

    def _read_file(self, name: str) -> StoredFile | None:
        return _read(self._files / name / "meta.json", StoredFile)

    def _remove(self, name: str) -> None:
        folder = self._files / name
        (folder / "meta.json").unlink(missing_ok=True)  # then it does not exist any more
        shutil.rmtree(folder, ignore_errors=True)

    # ---- batches

    def add_batch(self, batch: StoredBatch) -> None:
        names = _names(self._batches, _BATCH_ID)
        if len(names) >= self._limits.files:
            self._forget_batches(names, len(names) - self._limits.files + 1)
        folder = self._batches / batch.id
        folder.mkdir(parents=True)
        _replace(folder / "batch.json", batch)
        _sync(self._batches)

    def _forget_batches(self, names: list[str], count: int) -> None:
        """Remove the records of the oldest batches that have ended. Their files remain."""
        for name in names:
            batch = self._read_batch(name)
            if batch is None or batch.ended:
                shutil.rmtree(self._batches / name, ignore_errors=True)
                count -= 1
            if not count:
                return
        raise HttpError(409, f"{self._limits.files} batches are not done, the limit of this server; wait or cancel some")

    def batch(self, name: str) -> StoredBatch:
        found = self._read_batch(name) if _BATCH_ID.fullmatch(name) else None
        if found is None:
            raise HttpError(404, f"there is no batch {name!r:.80}", "batch_id")
        return found

    def shown(self, batch: StoredBatch) -> dict[str, Any]:
        return batch.shown(self.cancelling_at(batch))

    def batches(self, after: str | None = None, known: Container[str] = ()) -> Iterator[StoredBatch]:
        """Yield batches, the newest first. after: the id of the batch before the first one. known: ids that are left out"""
        for name in reversed(_names(self._batches, _BATCH_ID)):
            if (after is None or name < after) and name not in known:
                found = self._read_batch(name)
                if found is not None:
                    yield found

    def save(self, batch: StoredBatch) -> None:
        _replace(self._batches / batch.id / "batch.json", batch)

    def cancel(self, batch: StoredBatch) -> None:
        """Ask the worker to cancel the batch."""
        if batch.ended:
            raise HttpError(409, f"batch {batch.id} is {batch.status} and cannot be cancelled any more", "batch_id")
        (self._batches / batch.id / "cancel").touch()

    def cancelling_at(self, batch: StoredBatch) -> int | None:
        try:
            return int((self._batches / batch.id / "cancel").stat().st_mtime)
        except OSError:
            return None

    def output_paths(self, batch: StoredBatch) -> tuple[Path, Path]:
        """Return where the answers and the errors are while the batch runs."""
        folder = self._batches / batch.id
        return folder / "output", folder / "errors"

    def publish_outputs(self, batch: StoredBatch) -> None:
        """Make files of the answers and errors of a batch, unless they are empty. May be called again after a crash."""
        found: list[str | None] = []
        for path, name, kind in zip(
            self.output_paths(batch), (batch.output_name, batch.error_name), ("output", "error"), strict=True
        ):
            if path.exists() and not path.stat().st_size:
                path.unlink()
            if not path.exists() and not (self._files / name / "content").exists():
                found.append(None)
                continue
            now = int(time.time())
            expires = None if batch.output_expires_s is None else now + batch.output_expires_s
            self.add_file(path, StoredFile(name, 0, now, f"{batch.id}_{kind}.jsonl", "batch_output", expires))
            found.append(name)
        batch.output_file_id, batch.error_file_id = found

    def _read_batch(self, name: str) -> StoredBatch | None:
        return _read(self._batches / name / "batch.json", StoredBatch)


class Store:
    def __init__(self, root: Path, limits: StoreLimits) -> None:
        self.root, self._limits = root, limits
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def of(self, tenant: str | None) -> TenantStore:
        return TenantStore(self.root, tenant, self._limits)

    def tenants(self) -> list[TenantStore]:
        """Return the stores of all tenants that have one."""
        names = [entry.name for entry in _entries(self.root) if entry.is_dir(follow_symlinks=False)]
        return [self.of(None if name == OWNER else name) for name in sorted(names) if name == OWNER or _TENANT.fullmatch(name)]


# ---- the disk


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _names(folder: Path, pattern: "re.Pattern[str]") -> list[str]:
    """Return the names in a folder that match, in order."""
    return sorted(entry.name for entry in _entries(folder) if pattern.fullmatch(entry.name))


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for entry in _entries(folder):
        with contextlib.suppress(OSError):  # removed meanwhile
            if entry.is_dir(follow_symlinks=False):
                total += _size(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _read(path: Path, kind: type[R]) -> R | None:
    """Return the record; None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _replace(path: Path, record: Mapping[str, Any] | msgspec.Struct) -> None:
    """Write a record so that a crash leaves the old one or the new one."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
