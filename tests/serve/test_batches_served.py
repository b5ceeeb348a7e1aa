"""/v1/files and /v1/batches of a server process, through the openai client: tenants, limits, cancelling, kills and restarts."""

import io
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess, serving, wait_for

from patience import PATIENCE
from serving import error_of

KEYS = ("key-of-one", "key-of-other")
LIMITS = ("--batch-file-bytes", "20k", "--batch-lines", "300", "--batch-files", "12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(serve_model: Path, folder: Path) -> Iterator[ServerProcess]:
    with serving(serve_model, "--api-key", *KEYS, "--batch-dir", str(folder), *LIMITS) as server:
        yield server


def client_of(server: ServerProcess, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url()}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as http:
        yield http


def request(name: str, tokens: int = 2, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "a page", "max_tokens": tokens, "ignore_eos": True}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | changes


def upload(client: openai.OpenAI, lines: list[Any], **options: Any) -> str:
    content = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch", **options).id


def create(client: openai.OpenAI, file_id: str, **options: Any) -> Any:
    return client.batches.create(
        **{"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"} | options
    )


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    batch = client.batches.retrieve(batch_id)

    def is_over() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch_id)
        return batch.status in ("completed", "failed", "expired", "cancelled")

    wait_for(is_over)
    return batch


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_with_good_and_bad_lines(client: openai.OpenAI) -> None:
    wrong = request("f")
    wrong["body"] = wrong["body"] | {"model": "gpt-9"}
    lines = [request("a"), request("b"), "no json", request("a"), request("c", url="/v1/chat/completions"), {}, wrong]
    file_id = upload(client, lines)
    batch = create(client, file_id, metadata={"project": "ü"})
    assert (batch.status, batch.metadata) == ("validating", {"project": "ü"})
    batch = ended(client, batch.id)
    assert batch.status == "completed" and batch.request_counts.model_dump() == {"total": 7, "completed": 2, "failed": 5}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    assert batch.expires_at - batch.created_at == 24 * 3600
    answers = {line["custom_id"]: line for line in lines_of(client, batch.output_file_id)}
    assert sorted(answers) == ["a", "b"]
    for answer in answers.values():
        assert answer["error"] is None and answer["response"]["status_code"] == 200 and answer["id"].startswith("batch_req_")
        assert answer["response"]["body"]["usage"]["completion_tokens"] == 2
    errors = lines_of(client, batch.error_file_id)
    assert sorted((line["error"]["line"], line["error"]["code"]) for line in errors if line["error"]) == [
        (3, "invalid_json"), (4, "duplicate_custom_id"), (5, "mismatched_url"), (6, "missing_custom_id"),
    ]  # fmt: skip
    [refused] = [line for line in errors if line["error"] is None]
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("f", 404)
    assert "gpt-9" in refused["response"]["body"]["error"]["message"]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_files(client: openai.OpenAI, http: httpx.Client) -> None:
    first, second = upload(client, ["x"]), upload(client, ["y"], expires_after={"anchor": "created_at", "seconds": 3600})
    assert [file.id for file in client.files.list()] == [second, first]
    assert [file.id for file in client.files.list(order="asc", limit=1)] == [first, second]  # the client asks for every page
    assert [file.id for file in client.files.list(purpose="batch_output")] == []
    shown = client.files.retrieve(second)
    assert (shown.filename, shown.bytes, shown.purpose, shown.status) == ("in.jsonl", 1, "batch", "processed")
    assert shown.expires_at == shown.created_at + 3600
    content = http.get(f"/v1/files/{first}/content")
    assert content.content == b"x" and content.headers["x-content-type-options"] == "nosniff"
    assert client.files.delete(first).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first)


def test_hostile_uploads(client: openai.OpenAI, http: httpx.Client, folder: Path) -> None:
    binary = bytes(range(256)) * 20
    file = client.files.create(file=("../../../evil\x00\n.jsonl", binary), purpose="batch")
    assert client.files.content(file.id).read() == binary and "/" not in file.filename and "\n" not in file.filename
    batch = ended(client, create(client, file.id).id)
    assert batch.status == "completed" and batch.request_counts.completed == 0 < batch.request_counts.failed
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, ["x" * 20_001])
    assert refused.value.status_code == 413 and refused.value.param == "file"
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.files.create(file=b"x", purpose="assistants")
    assert error_of(http.post("/v1/files", content=b"x"))["param"] == "content-type"
    for name in ("..%2f..%2flock", "file-" + "0" * 32, "x" * 300):
        assert http.get(f"/v1/files/{name}").status_code == http.get(f"/v1/files/{name}/content").status_code == 404
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["lock"]
    assert not list(folder.glob("*/incoming/*"))


def test_an_upload_that_is_cut_off_leaves_nothing(server: ServerProcess, client: openai.OpenAI, folder: Path) -> None:
    host, port = re.sub("^http://", "", server.url()).rsplit(":", 1)
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Length: 9999\r\n"
        head += (
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\nContent-Disposition: form-data; name=file\r\n\r\nxx"
        )
        raw.sendall(head.encode())
        wait_for(lambda: list(folder.glob("*/incoming/*")))
    wait_for(lambda: not list(folder.glob("*/incoming/*")))
    assert list(client.files.list()) == []


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"input_file_id": "file-" + "0" * 32}, "file_id"),
        ({"extra_body": {"priority": 7}}, "body.priority"),
    ],
)
def test_batches_that_are_refused(client: openai.OpenAI, change: dict[str, Any], parameter: str) -> None:
    file_id = upload(client, [request("a")])
    with pytest.raises(openai.APIStatusError) as refused:
        create(client, file_id, **change)
    assert refused.value.status_code == (404 if parameter == "file_id" else 400) and refused.value.param == parameter


def test_files_without_lines_and_with_too_many_fail(client: openai.OpenAI) -> None:
    for lines, code in (["", " "], "empty_file"), (["{}"] * 301, "too_many_lines"):
        batch = ended(client, create(client, upload(client, lines)).id)
        assert batch.status == "failed" and batch.errors.data[0].code == code and batch.failed_at


def test_a_key_sees_only_its_own(server: ServerProcess, client: openai.OpenAI) -> None:
    file_id = upload(client, [request("a")])
    batch = ended(client, create(client, file_id).id)
    with client_of(server, KEYS[1]) as other:
        assert list(other.files.list()) == list(other.batches.list()) == []
        for ask in (
            lambda: other.files.retrieve(file_id), lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(file_id), lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id), lambda: create(other, file_id),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                ask()


def test_cancelling(client: openai.OpenAI, http: httpx.Client) -> None:
    first = create(client, upload(client, [request(str(i), 200) for i in range(100)]))
    second = create(client, first.input_file_id)  # of the same tenant: it waits
    with pytest.raises(openai.ConflictError, match="cancel that batch first"):
        client.files.delete(first.input_file_id)
    assert client.batches.cancel(second.id).status == "cancelling"
    over = ended(client, second.id)  # before its turn
    assert client.batches.retrieve(first.id).status == "in_progress"
    assert client.batches.cancel(first.id).cancelling_at is not None
    for batch in (ended(client, first.id), over):
        assert batch.status == "cancelled" and batch.cancelled_at
        assert len(lines_of(client, batch.output_file_id)) == batch.request_counts.completed
    assert error_of(http.post(f"/v1/batches/{first.id}/cancel"))["code"] == 409
    found = [batch.id for batch in client.batches.list(limit=1)]
    assert found.index(second.id) < found.index(first.id) and len(set(found)) == len(found)


def test_other_requests_come_first(server: ServerProcess, client: openai.OpenAI) -> None:
    """A batch that would take minutes does not hold a request up."""
    batch = create(client, upload(client, [request(str(i), 200) for i in range(100)]))
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    assert client.completions.create(model="tiny", prompt="b", max_tokens=3).choices[0].text
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_a_batch_survives_a_kill_and_answers_every_line_once(serve_model: Path, tmp_path: Path) -> None:
    count, flags = 60, ("--batch-dir", str(tmp_path), "--batch-concurrency", "4")
    with serving(serve_model, *flags, latency=0.02) as server, client_of(server) as client:
        batch_id = create(client, upload(client, [request(str(i), 5) for i in range(count)])).id
        wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed)
        server.process.kill()
    [output] = tmp_path.glob("*/batches/*/output")
    with output.open("ab") as file:
        file.write(b'{"id": "half a li')
    with serving(serve_model, *flags) as server, client_of(server) as client:
        batch = ended(client, batch_id)
        assert batch.status == "completed" and batch.request_counts.completed == count
        answered = Counter(line["custom_id"] for line in lines_of(client, batch.output_file_id))
        assert answered == {str(i): 1 for i in range(count)}
        expiring = create(client, upload(client, [request(str(i), 50) for i in range(300)]), completion_window="1m")
        [record] = tmp_path.glob(f"*/batches/{expiring.id}/batch.json")
        server.signal()
        assert server.wait() == 0  # a batch does not delay the end
    fields = json.loads(record.read_bytes())
    assert fields["status"] in ("validating", "in_progress")
    record.write_text(json.dumps(fields | {"expires_at": 1}))
    with serving(serve_model, *flags) as server, client_of(server) as client:
        batch = ended(client, expiring.id)
        assert batch.status == "expired" and batch.expired_at
        assert batch.request_counts.completed + batch.request_counts.failed == 300
        lines = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
        assert Counter(line["custom_id"] for line in lines) == {str(i): 1 for i in range(300)}
        assert {line["error"]["code"] for line in lines if line["error"]} == {"batch_expired"}
        assert io.BytesIO(client.files.content(batch.error_file_id).read()).readline()


def test_without_a_folder(shared_server: Any) -> None:
    for method, path in ("POST", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/file-x/content"):
        assert "--batch-dir" in error_of(shared_server.http.request(method, path))["message"]
