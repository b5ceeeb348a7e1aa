"""Adapters whose files are larger than they can be, or take long to read: nobody else waits for them, nor the server's end."""

import contextlib
import json
import math
import threading
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from server_process import serving, wait_for

from adapter_files import write_adapter
from quire.config.server_args import ServerArgs
from serving import Running, error_of

SIZE = 1 << 40  # bytes, which take a quarter of an hour to read
LOAD = "/v1/load_lora_adapter"


def named(folder: Path, shape: list[int], layer: int = 0) -> Path:
    size = 4 * math.prod(shape)
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight": entry}).encode()
    with (write_adapter(folder, "") / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return folder


@pytest.fixture(scope="module")
def vast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a layer that the model does not have."""
    return named(tmp_path_factory.mktemp("vast"), [2, SIZE // 8], 99)


def test_they_are_refused_by_their_header(serve_model: Path, vast: Path, tmp_path: Path) -> None:
    running = Running(serve_model, enable_lora=True)
    long, torch = write_adapter(tmp_path / "long", ""), write_adapter(tmp_path / "torch", "")
    with (long / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(SIZE)
    (torch / "adapter_model.safetensors").unlink()
    with (torch / "adapter_model.bin").open("wb") as file:
        file.truncate(SIZE)
    broken, beside = write_adapter(tmp_path / "broken", ""), write_adapter(tmp_path / "beside", "")
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 99)
    with (beside / "tokenizer.json").open("wb") as file:
        file.truncate(SIZE)
    narrow, wide = (named(tmp_path / f"{shape}", shape) for shape in ([2, 1 << 33], [1 << 33, 32]))
    try:
        with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:
            for path, message in (
                (vast, "adapter_model.safetensors: has 274,877,906,944 values"), (long, "more than its tensors need"),
                (torch, "up to max_lora_rank has"), (broken, "broken safetensors file"), (beside, "must have at most 256 MiB"),
                (narrow, "layers.0.self_attn.q_proj.lora_A.weight' has shape [2, 8589934592]"),
                (wide, f"{wide}: tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' has rank 8589934592; "
                 "max_lora_rank is 16; start with --max-lora-rank 8589934592"),
            ):  # fmt: skip
                error = error_of(http.post(LOAD, json={"lora_name": "x", "lora_path": str(path)}))
                assert error["code"] == 400 and message in error["message"], error
    finally:
        running.close()


def with_header(folder: Path, header: bytes, data: int = 0) -> Path:
    with (write_adapter(folder, "") / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(data))
    return folder


def tensors(count: int) -> bytes:
    entries = ({"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count))
    return json.dumps({f"base_model.model.model.layers.0.m{i}.weight": entry for i, entry in enumerate(entries)}).encode()


def test_a_header_that_no_adapter_of_the_model_has_is_not_parsed(serve_model: Path, tmp_path: Path) -> None:
    """What is refused by its size is not JSON: parsing it would say so."""
    metadata = json.dumps({"__metadata__": {str(i): "" for i in range(100_001)}}).encode()
    vast_config = write_adapter(tmp_path / "config", "")
    (vast_config / "adapter_config.json").write_bytes(b"{" * ((4 << 20) + 1))
    running = Running(serve_model, enable_lora=True)
    try:
        with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:
            for path, message in (
                (with_header(tmp_path / "bytes", b"{" * (4 << 20)), "header must have at most 3,145,728 bytes; got 4,194,304"),
                (with_header(tmp_path / "tensors", tensors(4097), 4097), "header must have at most 4,096 tensors; got more"),
                (with_header(tmp_path / "metadata", metadata), "header must have at most 100,000 keys of metadata; got more"),
                (vast_config, "is too large; got 4,194,305 bytes, at most 4,194,304 are read"),
            ):
                error = error_of(http.post(LOAD, json={"lora_name": "x", "lora_path": str(path)}))
                assert error["code"] == 400 and message in error["message"], error
    finally:
        running.close()


# the engine without a model does not know how large an adapter may be: all of it is read


def reading() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "quire-adapter"]


def test_reading_ends_when_the_client_leaves(serve_model: Path, vast: Path, tmp_path: Path) -> None:
    running = Running(serve_model, distributed_executor_backend="fake", enable_lora=True)
    good = write_adapter(tmp_path / "good", "1")
    try:
        with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:
            clients = [HTTPConnection(http.base_url.host, http.base_url.port or 80) for _ in range(12)]
            for i, client in enumerate(clients):
                body = json.dumps({"lora_name": f"x{i}", "lora_path": str(vast)})
                client.request("POST", LOAD, body, {"content-type": "application/json"})
            wait_for(lambda: len(reading()) == 12)
            assert http.post(LOAD, json={"lora_name": "good", "lora_path": str(good)}).status_code == 200
            for client in clients:
                client.close()
            wait_for(lambda: not reading())
    finally:
        running.close()


def test_the_server_ends_though_one_is_read(serve_model: Path, vast: Path) -> None:
    flags = ("--enable-lora", "--allow-runtime-lora-updating", "--shutdown-timeout", "0")
    with serving(serve_model, *flags) as server:
        answers: list[httpx.Response] = []

        def load() -> None:
            with server.client() as http:
                answers.append(http.post(LOAD, json={"lora_name": "x", "lora_path": str(vast)}))

        waiting = threading.Thread(target=load)
        server.url()
        waiting.start()
        wait_for(lambda: str(vast / "adapter_model.safetensors") in open_files(server.process.pid))
        server.signal()
        assert server.wait() == 0
        waiting.join()
        assert error_of(answers[0])["code"] == 503


def open_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(str(link.readlink()))
    return found
