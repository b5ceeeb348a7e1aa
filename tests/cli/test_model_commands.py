"""`quire pull`, `quire models --local` and `quire rm`, against a small hub on this machine."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants, file_download
from safetensors.numpy import save_file

from gguf_files import tiny_llama
from quire.cli import hub_download, model_store
from quire.cli.main import main
from quire.files import in_use
from quire.files.resolve import resolve_model

JSON = {"Content-Type": "application/json"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip


def etag(data: bytes) -> str:
    """Large files are named by their SHA-256, as git LFS does; small ones as git does."""
    return hashlib.sha256(data).hexdigest() if len(data) > 4096 else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(name: str, data: bytes) -> dict[str, Any]:
    oid = {"oid": etag(data), "size": len(data), "pointerSize": 100}
    lfs = {"lfs": oid} if len(data) > 4096 else {}
    return {
        "type": "file",
        "path": name,
        "size": len(data),
        "oid": hashlib.sha1(data).hexdigest() if lfs else etag(data),
        **lfs,
    }


class Hub(ThreadingHTTPServer):
    """A hub with repositories of bytes by file name; large files can be cut off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.cut_after: int | None = None  # bytes of a download, once
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        words = path.strip("/").split("/")
        repo = "/".join(words[2:4] if words[0] == "api" else words[:2])
        if repo not in self.server.repos:
            return self._refuse(404, "RepoNotFound")
        if words[0] == "api":
            files = self.server.repos[repo]
            if words[4:] and words[5] not in ("main", COMMIT):
                return self._refuse(404, "RevisionNotFound")
            if words[4:5] == ["tree"]:
                return self._send(200, json.dumps(list(map(entry, files, files.values()))).encode(), JSON)
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0,
                               "private": False}).encode()  # fmt: skip
            return self._send(200, body, JSON)
        if repo in self.server.gated:
            return self._refuse(403, "GatedRepo")
        data = self.server.repos[repo].get("/".join(words[4:]))
        if data is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self._send(206, data[start:], headers)
        return self._send(200, data, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cut_after is not None and len(body) > self.server.cut_after:
            body, self.server.cut_after = body[: self.server.cut_after], None
            self.close_connection = True
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(file_download, "ENDPOINT", address, raising=False)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "quire"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(hub_download, "MIN_RESUMED_BYTES", 4096)
    monkeypatch.setattr(hub_download, "RETRY_DELAYS_S", (0.0,))
    server.repos["org/tiny"] = safetensors_repo(tmp_path / "source")
    server.repos["org/ggufs"] = gguf_repo(tmp_path / "ggufs")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def safetensors_repo(directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    weights = {"model.embed_tokens.weight": np.zeros((32, 8), np.float32), "filler": np.ones((100, 100), np.float32)}
    save_file(weights, directory / "model.safetensors")
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": (directory / "model.safetensors").read_bytes(),
        "README.md": b"not fetched",
        "onnx/model.onnx": b"not fetched",
    }


def gguf_repo(directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    found = {}
    for name, seed in (("m-Q4_K_M.gguf", 0), ("m-Q8_0.gguf", 1)):
        tiny_llama(directory / name)
        found[name] = (directory / name).read_bytes() + bytes([seed])  # files that differ
    return found


def said(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    code = main(line)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_model_is_pulled_listed_and_removed(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "pull", "org/tiny")
    path = Path(out.strip())
    assert (code, path) == (0, tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == hub.repos["org/tiny"]["model.safetensors"]
    assert "org/tiny at 01234567: 2 files" in err and "to fetch; to " in err and str(tmp_path / "hub") in err
    assert "ready: LlamaForCausalLM" in err and "quire serve org/tiny" in err

    hub.requests.clear()
    code, _, err = said(capsys, "pull", "org/tiny")
    assert code == 0 and "nothing to fetch" in err
    assert not [request for request in hub.requests if request[0] == "GET" and "/resolve/" in request[1]]

    _, out, _ = said(capsys, "models", "--local")
    assert [row.split()[:2] for row in out.splitlines()] == [["NAME", "REVISION"], ["org/tiny", "main"]]
    _, out, _ = said(capsys, "models", "--local", "--json")
    (model,) = json.loads(out)
    size = len(hub.repos["org/tiny"]["model.safetensors"]) + len(hub.repos["org/tiny"]["config.json"])
    assert (model["nbytes"], model["format"], model["served"]) == (size, "safetensors", True)

    code, out, _ = said(capsys, "rm", "org/tiny", "--yes")
    assert code == 0 and out.startswith("removed org/tiny: ")
    assert not (tmp_path / "hub" / "models--org--tiny").exists()
    assert said(capsys, "models", "--local")[1].startswith("no models in ")


def test_a_download_that_was_cut_off_continues(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = hub.repos["org/tiny"]["model.safetensors"]
    blobs = tmp_path / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    name = hashlib.sha256(data).hexdigest()
    (blobs / (name + hub_download.INCOMPLETE)).write_bytes(data[:10_000])  # of a process that was killed
    assert "an interrupted download" in said(capsys, "models", "--local")[1]
    hub.cut_after = 5_000  # then the connection is lost once
    code, _, err = said(capsys, "pull", "org/tiny")
    size = sum(len(hub.repos["org/tiny"][name]) for name in ("config.json", "model.safetensors"))
    assert code == 0 and f"2 files, {size / 1e6:.1f} MB, {(size - 10_000) / 1e6:.1f} MB to fetch" in err
    assert (blobs / name).read_bytes() == data and not list(blobs.glob("*.incomplete"))
    ranges = [request[2] for request in hub.requests if request[0] == "GET" and request[1].endswith("model.safetensors")]
    assert ranges == ["bytes=10000-", "bytes=15000-"]


def test_damaged_bytes_are_not_kept(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = hub.repos["org/tiny"]["model.safetensors"]
    blobs = tmp_path / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (hashlib.sha256(data).hexdigest() + hub_download.INCOMPLETE)).write_bytes(bytes(10_000))
    code, out, err = said(capsys, "pull", "org/tiny")
    assert (code, out) == (1, "") and "another size or SHA-256" in err
    assert not list(blobs.iterdir())
    assert said(capsys, "pull", "org/tiny")[0] == 0


def test_one_gguf_file_of_several(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "pull", "org/ggufs")
    assert code == 1 and "Its GGUF files are m-Q4_K_M.gguf, m-Q8_0.gguf: quire pull org/ggufs/FILE" in err
    code, _, err = said(capsys, "pull", "org/ggufs:Q5_K_M")
    assert code == 1 and "has no Q5_K_M" in err
    assert said(capsys, "pull", "org/ggufs:Q4_K_M")[1].strip().endswith("m-Q4_K_M.gguf")
    assert said(capsys, "pull", "org/ggufs/m-Q8_0.gguf")[0] == 0
    names = [model["name"] for model in json.loads(said(capsys, "models", "--local", "--json")[1])]
    assert names == ["org/ggufs/m-Q4_K_M.gguf", "org/ggufs/m-Q8_0.gguf"]
    blobs = tmp_path / "hub" / "models--org--ggufs" / "blobs"
    assert said(capsys, "rm", "org/ggufs:q4_k_m", "-y")[0] == 0
    assert [path.stat().st_size for path in blobs.iterdir()] == [len(hub.repos["org/ggufs"]["m-Q8_0.gguf"])]
    assert said(capsys, "rm", "org/ggufs/m-Q8_0.gguf", "-y")[0] == 0  # the last: the repository goes, too
    assert not blobs.parent.exists()


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (["pull", "org/absent"], 1, "the hub has no model 'org/absent' that you may read. Check the spelling"),
        (["pull", "org/tiny", "--revision", "v9"], 1, "has no revision 'v9'"),
        (["pull", "org/gated"], 1, "'org/gated' is gated: accept its terms on its hub page, then give a token"),
        (["pull", "./nowhere"], 1, "./nowhere: no such file or directory"),
        (["pull", "https://hub.example/org/tiny/tree/main"], 1, "A hub model is named by its id alone: 'org/tiny'"),
        (["pull", "hf.example/org/ggufs:Q8_0"], 1, "A hub model is named by its id alone: 'org/ggufs:Q8_0'"),
        (["pull", ""], 1, "the model's name is empty"),
        (["rm", "org/absent", "--yes"], 1, "'org/absent' is not in "),
        (["rm", "smollm2", "--yes"], 1, "'smollm2' is not in "),
        (["rm", "/etc/passwd", "--yes"], 2, "'/etc/passwd' is a path, and `quire rm` removes only from the caches"),
        (["rm", "../..", "--yes"], 2, "is a path"),
        (["rm", "org/linked", "--yes"], 2, "is a link to a directory outside the cache"),
    ],
)
def test_refusals_say_what_to_do(
    line: list[str], code: int, told: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["org/gated"] = hub.repos["org/tiny"]
    hub.gated.add("org/gated")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "models--org--linked").symlink_to(tmp_path / "outside")
    got, out, err = said(capsys, *line)
    assert (got, out) == (code, "") and told in err and "Traceback" not in err
    assert (tmp_path / "outside" / "file").exists()


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "pull", "org/tiny")[0] == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert said(capsys, "pull", "org/tiny")[0] == 0  # all of it is there
    code, _, err = said(capsys, "pull", "org/ggufs:Q8_0")
    assert code == 1 and "the hub cannot be reached" in err and "run once with network" in err


def test_a_full_disk_is_known_before(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda path: usage)
    code, _, err = said(capsys, "pull", "org/tiny")
    assert code == 1 and "has no space for org/tiny" in err and "quire rm NAME" in err
    assert not [request for request in hub.requests if "/resolve/" in request[1]]


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code, _, err = said(capsys, "pull", "org/tiny", "--download-dir", str(tmp_path / "file"))
    assert code == 1 and "Traceback" not in err
    assert f"the model cannot be stored in {tmp_path / 'file'}" in err and "or set HF_HOME or --download-dir to another" in err


def test_an_address_of_the_hub_that_is_none(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "nonsense")
    code, _, err = said(capsys, "pull", "org/tiny")
    assert code == 1 and "'org/tiny' cannot be fetched from the hub (HF_ENDPOINT): " in err and "Traceback" not in err


def test_links_out_of_the_cache_are_not_followed(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "pull", "org/ggufs:Q4_K_M")
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(b"x")
    snapshot = tmp_path / "hub" / "models--org--ggufs" / "snapshots" / COMMIT
    (snapshot / "m-Q6_K.gguf").symlink_to(outside)
    (snapshot / "folder").symlink_to(tmp_path)
    assert said(capsys, "rm", "org/ggufs:Q6_K", "-y")[0] == 0
    assert outside.exists() and not (snapshot / "m-Q6_K.gguf").is_symlink() and (snapshot / "m-Q4_K_M.gguf").exists()
    assert said(capsys, "rm", "org/ggufs", "-y")[0] == 0
    assert outside.exists() and not snapshot.exists()


def test_rm_asks_and_keeps_without_a_yes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "pull", "org/tiny")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    code, _, err = said(capsys, "rm", "org/tiny")
    assert code == 2 and "there is no terminal to ask on; give --yes" in err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    questions: list[str] = []
    for answer, code in (("", 1), ("no", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda text, answer=answer: questions.append(text) or answer)
        assert said(capsys, "rm", "org/tiny")[0] == code
    assert "remove org/tiny, 0.0 MB, from " in questions[0]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="processes are listed by /proc")
def test_a_model_in_use_stays(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(said(capsys, "pull", "org/tiny")[1].strip()) / "model.safetensors"
    code = "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, access=1); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline()
        got, _, err = said(capsys, "rm", "org/tiny", "-y")
        assert got == 1 and f"used by process {reader.pid}" in err and path.exists()
        reader.communicate(b"\n")
    assert said(capsys, "rm", "org/tiny", "-y")[0] == 0


def test_a_model_that_is_being_removed_does_not_start(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(said(capsys, "pull", "org/tiny")[1].strip())
    with in_use.claimed([path / "config.json", path / "config.json"]) as marked:  # one file, named twice
        assert marked == []
        code, _, err = said(capsys, "run", str(path), "hello")
        assert code == 1 and "its files are being removed by `quire rm`. Start again when it has ended" in err


def test_a_user_that_cannot_be_seen_counts(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(said(capsys, "pull", "org/tiny")[1].strip())
    monkeypatch.setattr(model_store, "PROC", tmp_path)  # another user's processes, or no /proc
    used = in_use.InUse([resolve_model(str(path))])
    code, _, err = said(capsys, "rm", "org/tiny", "-y")
    assert code == 1 and "'org/tiny' is used by a process that cannot be seen from here" in err
    del used
    assert said(capsys, "rm", "org/tiny", "-y")[0] == 0


def test_an_alias_in_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "quire"
    cache.mkdir()
    model = model_store.wheel.ALIASES["smollm2"]
    tiny_llama(cache / model.file_name)
    monkeypatch.setattr(model_store.wheel, "cached", lambda name: cache / model.file_name)
    assert "smollm2" in said(capsys, "models", "--local")[1]
    (cache / "other").touch()
    assert said(capsys, "rm", "smollm2", "-y")[0] == 0
    assert [path.name for path in cache.iterdir()] == ["other"]


@pytest.mark.parametrize("present", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"])
def test_a_model_with_missing_shards_is_listed(
    present: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["org/shards"] = {present: hub.repos["org/ggufs"]["m-Q8_0.gguf"]}
    assert said(capsys, "pull", f"org/shards/{present}")[0] == 1
    (model,) = json.loads(said(capsys, "models", "--local", "--json")[1])
    assert (model["format"], model["served"]) == ("incomplete", False) and "missing" in model["about"]


def test_models_that_cannot_be_served_say_why(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = dict(hub.repos["org/tiny"])
    files["config.json"] = json.dumps({**CONFIG, "is_encoder_decoder": True}).encode()
    hub.repos["org/t5"] = files
    code, _, err = said(capsys, "pull", "org/t5")
    assert code == 0 and "fetched, but Quire cannot serve it" in err
    (model,) = json.loads(said(capsys, "models", "--local", "--json")[1])
    assert not model["served"] and "encoder-decoder models are not supported" in model["about"]
