"""`quire rm` of models that a running server has open: a hub snapshot, a GGUF file of several, the default model."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_process import ServerProcess, serving

from gguf_files import tiny_llama
from quire.files.resolve import resolve_model
from tiny_model import make_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of commands whose caches hold `org/tiny`, `org/other` and two GGUF models of `org/ggufs`."""
    directory = tmp_path_factory.mktemp("caches")
    for repo in ("org/tiny", "org/other"):
        make_model(snapshot(directory / "hub", repo))
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        tiny_llama(snapshot(directory / "hub", "org/ggufs") / name)
    (directory / "quire").mkdir()
    yield {
        "HF_HUB_CACHE": str(directory / "hub"),
        "HF_HUB_OFFLINE": "1",
        "QUIRE_CACHE": str(directory / "quire"),
    }


def snapshot(hub: Path, repo: str) -> Path:
    """Make the directories of a repository in the hub's cache; return that of its files."""
    directory = hub / f"models--{repo.replace('/', '--')}"
    (directory / "refs").mkdir(parents=True, exist_ok=True)
    (directory / "refs" / "main").write_text(COMMIT)
    (directory / "snapshots" / COMMIT).mkdir(parents=True, exist_ok=True)
    return directory / "snapshots" / COMMIT


def remove(name: str, environment: dict[str, str], *flags: str) -> tuple[int, str]:
    line = [sys.executable, "-m", "quire.cli.main", "rm", name, "--yes", *flags]
    done = subprocess.run(line, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def refused(server: ServerProcess, name: str, environment: dict[str, str]) -> bool:
    code, told = remove(name, environment)
    assert f"'{name}' is used by process {server.process.pid} (" in told and "End it first, or give --force" in told, told
    return code == 1


def test_a_served_model_stays_until_its_server_is_gone(caches: dict[str, str]) -> None:
    with ExitStack() as stack:
        tiny = stack.enter_context(serving(Path("org/tiny"), **caches))
        other_flags = ("--skip-tokenizer-init", "--api-server-count", "2")
        gguf = stack.enter_context(serving(Path("org/ggufs:Q8_0"), *other_flags, **caches))
        tiny.url(), gguf.url()
        assert refused(tiny, "org/tiny", caches)
        assert refused(gguf, "org/ggufs:Q8_0", caches)
        assert refused(gguf, "org/ggufs/m-Q8_0.gguf", caches)
        assert refused(gguf, "org/ggufs", caches)
        assert remove("org/other", caches)[0] == 0
        assert remove("org/ggufs:Q4_K_M", caches)[0] == 0
        tiny.signal(signal.SIGKILL)
        tiny.wait()
        assert remove("org/tiny", caches)[0] == 0
        assert remove("org/ggufs:Q8_0", caches, "--force")[0] == 0


def test_a_draft_model_stays(caches: dict[str, str]) -> None:
    hub = Path(caches["HF_HUB_CACHE"])
    for repo in ("org/large", "org/small"):
        make_model(snapshot(hub, repo))
    drafts = '{"method": "draft_model", "model": "org/small", "num_speculative_tokens": 2}'
    with serving(Path("org/large"), "--speculative-config", drafts, **caches) as server:
        server.url()
        assert refused(server, "org/small", caches)
    assert remove("org/small", caches)[0] == 0


@pytest.mark.model
def test_the_default_model_stays(caches: dict[str, str]) -> None:
    shutil.copy(resolve_model("smollm2").path, caches["QUIRE_CACHE"])
    with serving(Path("smollm2"), **caches) as server:
        server.url()
        assert refused(server, "smollm2", caches)
    assert remove("smollm2", caches)[0] == 0
