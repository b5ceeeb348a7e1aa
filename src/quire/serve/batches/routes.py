"""/v1/files and /v1/batches, as OpenAI's: a tenant sees only its own."""

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse

from quire.async_llm import AsyncLLM
from quire.config.server_args import ServerArgs
from quire.serve.batches.calls import LocalClient
from quire.serve.batches.lines import PATHS
from quire.serve.batches.store import Store, StoredBatch, StoredFile, StoreLimits, TenantStore, new_name
from quire.serve.batches.throttle import IDLE_SHARE, OnlineRequests, YieldingPermits, busy_lines
from quire.serve.batches.upload import FILE, MAX_FIELD_BYTES, Upload, bad
from quire.serve.batches.worker import BatchWorker
from quire.serve.body import ClientGone, JSONRoute
from quire.serve.errors import ErrorBody, HttpError, json_response
from quire.types.errors import ConfigError

LEAST_PRIORITY = 2**40  # of lines of batches, if the engine schedules by priority: every other request comes first
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_WINDOW_S = {"m": 60, "h": 3600, "d": 24 * 3600}
_Responses = dict[int | str, dict[str, Any]]
_NOT_FOUND: _Responses = {404: {"model": ErrorBody}}

batch_router = APIRouter(tags=["batches"])
closed_batch_router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Batches:
    store: Store
    worker: BatchWorker
    settings: ServerArgs
    task: "asyncio.Task[None]"


def start_batches(app: FastAPI, llm: AsyncLLM, settings: ServerArgs, online: OnlineRequests) -> None:
    """Begin to run the batches in the folder. Must be called in a running event loop."""
    assert settings.batch_dir is not None
    limits = StoreLimits(settings.batch_file_bytes, settings.batch_files, settings.batch_disk_bytes)
    try:
        store = Store(Path(settings.batch_dir).expanduser(), limits)
    except OSError as error:
        raise ConfigError(f"--batch-dir {settings.batch_dir} cannot be written to: {error.strerror}") from None
    most = settings.batch_concurrency or max(1, int(IDLE_SHARE * llm.config.max_seqs * len(llm.engines)))

    def quiet_s() -> float:
        """Return the seconds since this process had requests that are not lines of batches; 0 while another one has some."""
        stats = llm.stats if settings.api_server_count > 1 else None
        return 0.0 if stats is not None and stats.running + stats.waiting > llm.num_open else online.quiet_s

    priority = LEAST_PRIORITY if llm.config.policy == "priority" else None
    alone = settings.api_server_count == 1
    permits = YieldingPermits(most, busy_lines(most, llm.config.device), quiet_s)
    worker = BatchWorker(llm, LocalClient(app, priority), store, permits, settings.batch_lines, priority, alone)
    app.state.batches = Batches(store, worker, settings, asyncio.create_task(worker.run(), name="quire-batches"))


def _batches_of(raw: Request) -> tuple[Batches, TenantStore]:
    batches = raw.app.state.batches
    assert isinstance(batches, Batches)
    return batches, batches.store.of(getattr(raw.state, "tenant", None))


# ---- files


@batch_router.post("/v1/files", responses={400: {"model": ErrorBody}, 413: {"model": ErrorBody}})
async def upload_file(raw: Request) -> Response:
    batches, store = _batches_of(raw)
    most = batches.settings.batch_file_bytes
    declared = raw.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > 2 * most + MAX_FIELD_BYTES:
        raise HttpError(413, f"the file may have at most {most} bytes", FILE)
    path, room = await asyncio.to_thread(_prepare, store)
    try:
        file = await _receive(raw, path, min(most, room), room < most)
        await asyncio.to_thread(store.add_file, path, file)
    except OSError as error:
        raise HttpError(507, f"the file cannot be stored: {error.strerror or 'input or output failed'}", FILE) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return json_response(file.shown())


def _prepare(store: TenantStore) -> tuple[Path, int]:
    store.check_count()
    try:
        return store.incoming(), store.room()
    except OSError as error:
        raise HttpError(507, f"the file cannot be stored: {error.strerror}", FILE) from None


async def _receive(raw: Request, path: Path, most: int, full: bool) -> StoredFile:
    """full: the disk has less room than a file may take"""
    with await asyncio.to_thread(path.open, "xb") as target:
        upload = Upload(raw.headers.get("content-type", ""), target, most)
        try:
            await upload.receive(raw.stream())
        except ClientDisconnect:
            raise ClientGone from None
        except HttpError as error:
            if error.status_code == 413 and full and upload.bytes > most:
                message = f"files may take {most} bytes more on this server; delete some"
                raise HttpError(413, message, FILE) from None
            raise
    fields = upload.fields
    if fields.get("purpose") != "batch":
        raise bad(f"purpose must be batch; got {fields.get('purpose', 'none')!r:.80}", "purpose")
    if unknown := set(fields) - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}:
        raise bad(f"unknown fields: {', '.join(sorted(unknown))[:200]}", min(unknown)[:80])
    now = int(time.time())
    assert upload.filename is not None
    return StoredFile(new_name("file-"), upload.bytes, now, upload.filename, "batch", _expiry(fields, now))


def _expiry(fields: dict[str, str], now: int) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad(f"expires_after.anchor must be created_at; got {anchor!r:.80}", "expires_after")
    count = int(seconds) if seconds is not None and re.fullmatch("[0-9]{1,9}", seconds) else 0
    if not MIN_EXPIRY_S <= count <= MAX_EXPIRY_S:
        message = f"expires_after.seconds must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}; got {seconds!r:.80}"
        raise bad(message, "expires_after")
    return now + count


@batch_router.get("/v1/files")
async def list_files(
    raw: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    _, store = _batches_of(raw)

    def find() -> list[StoredFile]:
        files = [file for file in store.files() if purpose is None or file.purpose == purpose]
        if order == "asc":
            files.reverse()
        first = 0 if after is None else next((i + 1 for i, file in enumerate(files) if file.id == after), len(files))
        return files[first : first + limit + 1]

    return json_response(_page([file.shown() for file in await asyncio.to_thread(find)], limit))


@batch_router.get("/v1/files/{file_id}", responses=_NOT_FOUND)
async def show_file(file_id: str, raw: Request) -> Response:
    _, store = _batches_of(raw)
    return json_response((await asyncio.to_thread(store.file, file_id)).shown())


@batch_router.get("/v1/files/{file_id}/content", responses=_NOT_FOUND)
async def file_content(file_id: str, raw: Request) -> Response:
    _, store = _batches_of(raw)
    path = await asyncio.to_thread(store.content, file_id)
    headers = {"X-Content-Type-Options": "nosniff"}
    return FileResponse(path, media_type="application/octet-stream", filename=f"{file_id}.jsonl", headers=headers)


@batch_router.delete("/v1/files/{file_id}", responses={**_NOT_FOUND, 409: {"model": ErrorBody}})
async def delete_file(file_id: str, raw: Request) -> Response:
    _, store = _batches_of(raw)
    await asyncio.to_thread(store.delete_file, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _page(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return OpenAI's list of the first `limit` objects; one more in `found` means that there are more."""
    data = found[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}


# ---- batches


class Expiry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class BatchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(description="an uploaded file with purpose batch")
    endpoint: str = Field(description="the url of all lines")
    completion_window: str = Field(description="time after which lines that are not done expire: 24h, 90m, 7d")
    metadata: dict[str, str] | None = Field(None, description="at most 16 pairs")
    output_expires_after: Expiry | None = Field(None, description="time after which the output files are deleted")


async def create_batch(request: BatchRequest, raw: Request) -> Response:
    batches, store = _batches_of(raw)
    if request.endpoint not in PATHS:
        raise bad(f"endpoint must be one of {', '.join(PATHS)}; got {request.endpoint!r:.80}", "endpoint")
    window = _WINDOW.fullmatch(request.completion_window)
    if window is None:
        message = f"completion_window must be a time such as 24h, 90m or 7d; got {request.completion_window!r:.80}"
        raise bad(message, "completion_window")
    _check_metadata(request.metadata or {})
    now = int(time.time())
    batch = StoredBatch(
        id=new_name("batch_"),
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        created_at=now,
        expires_at=now + int(window[1]) * _WINDOW_S[window[2]],
        output_name=new_name("file-"),
        error_name=new_name("file-"),
        metadata=request.metadata,
        output_expires_s=None if request.output_expires_after is None else request.output_expires_after.seconds,
    )

    def add() -> None:
        if store.file(request.input_file_id).purpose != "batch":
            raise bad(f"input_file_id must be a file with purpose batch; got {request.input_file_id}", "input_file_id")
        store.add_batch(batch)

    try:
        await asyncio.to_thread(add)
    except OSError as error:
        raise HttpError(507, f"the batch cannot be stored: {error.strerror}") from None
    batches.worker.notify()
    return json_response(batch.shown(None))


batch_router.add_api_route(
    "/v1/batches", create_batch, methods=["POST"], responses={400: {"model": ErrorBody}, **_NOT_FOUND},
    route_class_override=JSONRoute,
)  # fmt: skip


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad(f"metadata may have at most {MAX_METADATA} pairs; got {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            most = f"{MAX_METADATA_KEY} characters in a key and {MAX_METADATA_VALUE} in a value"
            raise bad(f"metadata may have at most {most}; {key!r:.80} has more", "metadata")


@batch_router.get("/v1/batches")
async def list_batches(raw: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> Response:
    _, store = _batches_of(raw)

    def find() -> list[dict[str, Any]]:
        return [store.shown(batch) for batch in islice(store.batches(after), limit + 1)]

    return json_response(_page(await asyncio.to_thread(find), limit))


@batch_router.get("/v1/batches/{batch_id}", responses=_NOT_FOUND)
async def show_batch(batch_id: str, raw: Request) -> Response:
    _, store = _batches_of(raw)
    return json_response(await asyncio.to_thread(lambda: store.shown(store.batch(batch_id))))


@batch_router.post("/v1/batches/{batch_id}/cancel", responses={**_NOT_FOUND, 409: {"model": ErrorBody}})
async def cancel_batch(batch_id: str, raw: Request) -> Response:
    batches, store = _batches_of(raw)

    def cancel() -> dict[str, Any]:
        batch = store.batch(batch_id)
        store.cancel(batch)
        return store.shown(batch)

    answer = await asyncio.to_thread(cancel)
    batches.worker.notify()
    return json_response(answer)


# ---- without --batch-dir


async def _closed(_: Request) -> Response:
    raise HttpError(404, "this server has no files and batches: start it with --batch-dir DIR")


for _path in ("/v1/files", "/v1/batches"):
    for _rest in ("", "/{rest:path}"):
        closed_batch_router.add_api_route(_path + _rest, _closed, methods=["GET", "POST", "DELETE"], response_model=None)
