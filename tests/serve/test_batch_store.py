"""Files and batches on disk: limits, tenants, what a crash leaves, and forms from hostile clients."""

import asyncio
import fcntl
import io
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.server_args import ServerArgs
from quire.serve.batches.store import Store, StoredBatch, StoredFile, StoreLimits, TenantStore, new_name
from quire.serve.batches.upload import Upload, safe_filename
from quire.serve.batches.worker import BatchWorker
from quire.serve.errors import HttpError
from quire.types.errors import ConfigError

TENANTS = ("a" * 32, "b" * 32)
LIMITS = StoreLimits(file_bytes=1000, files=3, disk_bytes=10_000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "batches", LIMITS)


def add_file(own: TenantStore, content: bytes = b"x\n", expires_at: int | None = None) -> str:
    path = own.incoming()
    path.write_bytes(content)
    file = StoredFile(new_name("file-"), 0, int(time.time()), "in.jsonl", "batch", expires_at)
    own.add_file(path, file)
    assert file.bytes == len(content)
    return file.id


def add_batch(own: TenantStore, input_id: str) -> StoredBatch:
    batch = StoredBatch(new_name("batch_"), "/v1/completions", input_id, "1h", 1, 2, new_name("file-"), new_name("file-"))
    own.add_batch(batch)
    return batch


def status(error: "pytest.ExceptionInfo[HttpError]") -> int:
    return error.value.status_code


def test_a_tenant_sees_only_its_own(store: Store) -> None:
    one, other = map(store.of, TENANTS)
    name = add_file(one)
    batch = add_batch(one, name)
    assert [file.id for file in one.files()] == [name] and not list(other.files()) and not list(other.batches())
    for ask in (lambda: other.file(name), lambda: other.content(name), lambda: other.delete_file(name)):
        with pytest.raises(HttpError) as error:
            ask()
        assert status(error) == 404
    with pytest.raises(HttpError) as error:
        other.batch(batch.id)
    assert status(error) == 404
    assert [each.tenant for each in store.tenants()] == [TENANTS[0]]


@pytest.mark.parametrize("name", ["../../lock", "file-../x", "file-" + "A" * 32, "", "file-" + "a" * 31 + "\n", "\0"])
def test_ids_are_no_paths(store: Store, name: str) -> None:
    with pytest.raises(HttpError) as error:
        store.of(None).content(name)
    assert status(error) == 404
    with pytest.raises(HttpError):
        store.of(None).batch(name)


def test_limits(store: Store) -> None:
    own = store.of(None)
    first = add_file(own)
    batch = add_batch(own, first)
    with pytest.raises(HttpError, match="cancel that batch first") as error:
        own.delete_file(first)
    assert status(error) == 409
    own.cancel(batch)
    assert own.shown(own.batch(batch.id))["status"] == "cancelling"
    batch.status = "cancelled"
    own.save(batch)
    with pytest.raises(HttpError, match="is cancelled and cannot be cancelled") as error:
        own.cancel(batch)
    assert status(error) == 409
    own.delete_file(first)
    for _ in range(3):
        add_file(own)
    with pytest.raises(HttpError, match="there are 3 files") as error:
        own.check_count()
    assert status(error) == 409
    live = [add_batch(own, first) for _ in range(3)]  # the first one has ended, and makes room
    assert [each.id for each in own.batches()] == [each.id for each in reversed(live)]
    assert [each.id for each in own.batches(after=live[1].id)] == [live[0].id]
    with pytest.raises(HttpError, match="batches are not done") as error:
        add_batch(own, first)
    assert status(error) == 409


def test_no_tenant_takes_more_room_than_it_leaves(store: Store) -> None:
    one, other = map(store.of, TENANTS)
    assert 4900 < one.room() <= 5000
    add_file(one, b"x" * 4900)
    assert one.room() < 110 and 2000 < other.room() < 2600
    assert 4500 < store.of(None).room() < 5100


def test_records_that_cannot_be_read_do_not_exist(store: Store) -> None:
    own = store.of(None)
    name, other = add_file(own), add_file(own)
    batch = add_batch(own, name)
    folder = store.root / "default"
    (folder / "files" / name / "meta.json").write_bytes(b"\0\0\0")
    (folder / "batches" / batch.id / "batch.json").write_bytes(b'{"id":')
    (folder / "files" / "file-junk").mkdir()
    assert [file.id for file in own.files()] == [other] and not list(own.batches())


def test_expired_files_are_removed_but_not_the_input_of_a_batch(store: Store) -> None:
    own = store.of(None)
    gone, kept, used = add_file(own, expires_at=1), add_file(own), add_file(own, expires_at=1)
    batch = add_batch(own, used)
    stale, fresh = own.incoming(), own.incoming()
    for upload in (stale, fresh):
        upload.write_bytes(b"x")
    os.utime(stale, (1, 1))
    own.remove_expired()
    assert [file.id for file in own.files()] == [kept]
    with own.input(batch) as content:
        assert content.read() == b"x\n"
    assert not stale.exists() and fresh.exists()
    assert not (store.root / "default" / "files" / gone).exists()


@pytest.mark.parametrize("crash", ["before", "between", "after"])
def test_outputs_are_published_once_whatever_crashed(store: Store, crash: str) -> None:
    own = store.of(None)
    batch = add_batch(own, add_file(own))
    output, errors = own.output_paths(batch)
    output.write_bytes(b"answers\n")
    errors.write_bytes(b"")
    if crash == "between":
        folder = store.root / "default" / "files" / batch.output_name
        folder.mkdir(parents=True)
        output.replace(folder / "content")
    elif crash == "after":
        own.publish_outputs(batch)
    again = own.batch(batch.id)
    own.publish_outputs(again)
    assert (again.output_file_id, again.error_file_id) == (batch.output_name, None)
    assert own.content(batch.output_name).read_bytes() == b"answers\n"
    assert own.file(batch.output_name).bytes == 8 and not output.exists() and not errors.exists()


def test_the_folder_is_checked_with_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        ServerArgs(batch_dir=str(tmp_path / "file"))
    ServerArgs(batch_dir=str(tmp_path / "new" / "deep"))
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("quire.config.server_args.os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written to"):
        ServerArgs(batch_dir=str(tmp_path))


# ---- forms


def form(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--edge\r\n%s\r\n\r\n%s\r\n" % (head.encode(), content) for head, content in parts) + b"--edge--\r\n"


def part(name: str, filename: str | None = None) -> str:
    return f'Content-Disposition: form-data; name="{name}"' + ("" if filename is None else f'; filename="{filename}"')


def receive(
    body: bytes, size: int = 7, most: int = 10_000, kind: str = "multipart/form-data; boundary=edge"
) -> tuple[Upload, bytes]:
    target = io.BytesIO()
    upload = Upload(kind, target, most)

    async def chunks() -> AsyncIterator[bytes]:
        for i in range(0, len(body), size):
            yield body[i : i + size]

    asyncio.run(upload.receive(chunks()))
    return upload, target.getvalue()


@given(
    st.lists(st.sampled_from([b"\r\n", b"--edge", b"--", b"\r", b"\n", b"-", b"e", b"\r\n--edg", b"\0"])).map(b"".join),
    st.integers(1, 40),
)
def test_a_form_is_read_in_any_chunks(content: bytes, size: int) -> None:
    while b"\r\n--edge" in content:  # what is left may form another one
        content = content.replace(b"\r\n--edge", b"")
    body = form((part("purpose"), b"batch"), (part("file", "a.jsonl"), content))
    upload, received = receive(body, size)
    assert received == content and upload.fields == {"purpose": "batch"} and upload.filename == "a.jsonl"


@pytest.mark.parametrize(
    ("body", "status_code", "message"),
    [
        (b"", 400, "ends before its last boundary"),
        (form((part("file", "a"), b"x"))[:-4], 400, "ends before its last boundary"),
        (form((part("purpose"), b"batch")), 400, "has no file"),
        (form((part("file", "a"), b"x"), (part("file", "b"), b"x")), 400, "more than one file"),
        (form(("X: y", b"x")), 400, "must have a name"),
        (b"x" * 20_000, 400, "must begin with a boundary"),
        (b"--edge\r\n" + b"x" * 20_000, 400, "at most 8192 bytes of headers"),
        (form(*[(part("a"), b"")] * 50), 400, "at most 32 parts"),
        (form((part("a"), b"x" * 70_000)), 413, "fields of the form"),
        (form((part("file", "a"), b"x" * 10_001)), 413, "at most 10000 bytes"),
    ],
)
def test_forms_that_are_refused(body: bytes, status_code: int, message: str) -> None:
    with pytest.raises(HttpError, match=message) as error:
        receive(body, 1000)
    assert status(error) == status_code


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 200])
def test_other_content_types(kind: str) -> None:
    with pytest.raises(HttpError, match="multipart/form-data with a boundary"):
        receive(form(), kind=kind)


@pytest.mark.parametrize(
    ("given_name", "shown"),
    [
        ("../../etc/passwd", "passwd"), ("C:\\x\\y.jsonl", "y.jsonl"), ("a\0b\n\x1bc", "abc"), 
        ("/", "upload.jsonl"), (None, "upload.jsonl"),
        ("漢字.jsonl", "漢字.jsonl"), ("x" * 900, "x" * 255),
    ],
)  # fmt: skip
def test_file_names_are_only_shown(given_name: str | None, shown: str) -> None:
    assert safe_filename(given_name) == shown


@pytest.mark.parametrize("alone", [True, False])
def test_a_second_server_on_a_folder_logs_that_it_waits(store: Store, alone: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        worker = asyncio.create_task(BatchWorker(Mock(), Mock(), store, Mock(), 1, None, alone).run())
        await asyncio.wait([worker], timeout=0.05)
        assert not worker.done()
        worker.cancel()

    with (store.root / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        asyncio.run(run())
    assert ("is used by another server" in caplog.text) == alone
