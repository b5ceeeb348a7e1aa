"""The models on this disk: the hub's cache and the models with short names. List them, find one by name, remove it."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.cli.hub_download import repository_directory
from quire.config.facts import ModelFacts, read_facts
from quire.config.families import architectures
from quire.files import wheel
from quire.files.cache import cache_directory
from quire.files.in_use import MARKED_NAMES, claimed
from quire.files.resolve import HubName, hub_name, resolve_model
from quire.files.safetensors import group_models
from quire.types.errors import ConfigError, ModelError, ModelNotFound, QuireError

PROC = Path("/proc")
MAX_SHOWN_COMMAND = 80  # characters of a process's command line
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pth", ".pt")


@dataclass(frozen=True)
class StoredModel:
    name: str  # as commands take it
    source: str  # "hub" or "package index"
    path: Path
    revision: str  # branch or tag, else the first digits of the commit; empty: none
    nbytes: int
    format: str  # "safetensors", "gguf", "pickle", "no weights" or "incomplete"
    served: bool  # Quire can serve it
    about: str  # architecture, dtype and parameters, or why it cannot be served


def stored_models(hub: Path) -> list[StoredModel]:
    """Return the models of Quire's cache and of the hub's cache directory `hub`."""
    return [*_aliases(), *(model for directory in _repositories(hub) for model in _of_repository(directory))]


def _aliases() -> Iterator[StoredModel]:
    for name in wheel.ALIASES:
        if path := wheel.cached(name):
            served, about = _describe(name)
            yield StoredModel(name, "package index", path, "", path.stat().st_size, "gguf", served, about)


def _repositories(hub: Path) -> list[Path]:
    return sorted(path for path in hub.glob("models--*") if path.is_dir())


def _of_repository(directory: Path) -> Iterator[StoredModel]:
    repo = directory.name.removeprefix("models--").replace("--", "/", 1)
    refs = _refs(directory)
    for snapshot in sorted((directory / "snapshots").glob("*")):
        revision = ", ".join(refs.get(snapshot.name, ())) or snapshot.name[:8]
        yield from _of_snapshot(repo, snapshot, revision)
    if left := sum(path.stat().st_size for path in (directory / "blobs").glob("*.incomplete")):
        about = f"an interrupted download; `quire pull` completes it, `quire rm {repo}` removes it"
        yield StoredModel(repo, "hub", directory, "", left, "incomplete", False, about)


def _refs(directory: Path) -> dict[str, list[str]]:
    """Return the names of branches and tags by commit."""
    found: dict[str, list[str]] = {}
    for path in sorted((directory / "refs").rglob("*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.setdefault(path.read_text().strip(), []).append(path.relative_to(directory / "refs").as_posix())
    return found


def _of_snapshot(repo: str, snapshot: Path, revision: str) -> Iterator[StoredModel]:
    files = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
    ggufs = [path for path in files if path.suffix == ".gguf"]
    groups, problem = [], "the first shard of a GGUF model is missing, or there is no text model"
    try:
        groups = group_models(ggufs)
    except ModelError as error:  # shards are missing
        problem = str(error)
    if ggufs and not groups:
        yield StoredModel(repo, "hub", snapshot, revision, _bytes(ggufs), "incomplete", False, problem)
    for shards in groups:
        name = f"{repo}/{shards[0].relative_to(snapshot).as_posix()}"
        served, about = _describe(str(shards[0]))
        yield StoredModel(name, "hub", shards[0], revision, _bytes(shards), "gguf", served, about)
    rest = [path for path in files if path.suffix != ".gguf"]
    suffixes = {path.suffix for path in rest}
    if ggufs and not suffixes & {*WEIGHTS}:
        return  # texts beside GGUF files
    if not rest and ggufs:
        return
    kind = "safetensors" if ".safetensors" in suffixes else "pickle" if suffixes & {*WEIGHTS} else "no weights"
    served, about = _describe(str(snapshot)) if kind != "no weights" else (False, "only configuration or tokenizer files")
    yield StoredModel(repo, "hub", snapshot, revision, _bytes(rest), kind, served, about)


def _bytes(paths: Sequence[Path]) -> int:
    """Return the size of files on disk; files that are linked twice count once."""
    found = {(status.st_dev, status.st_ino): status.st_size for status in (path.stat() for path in paths)}
    return sum(found.values())


def _describe(model: str) -> tuple[bool, str]:
    """Return whether Quire can serve a local model, and what it is or why not."""
    try:
        facts = read_facts(resolve_model(model))
    except QuireError as error:
        return False, str(error).removeprefix(f"{model}: ")
    return True, summary(facts)


def summary(facts: ModelFacts) -> str:
    quantization = facts.quantization.method if facts.quantization is not None else facts.dtype
    kind = "GGUF" if facts.files.format == "gguf" else quantization
    count = f"{facts.parameters / 1e9:.1f} B" if facts.parameters >= 1e9 else f"{facts.parameters / 1e6:.0f} M"
    by = "" if facts.files.format == "gguf" or facts.architecture in architectures() else ", through transformers"
    return f"{facts.architecture}, {count} parameters, {kind}{by}"


@dataclass(frozen=True)
class Removal:
    """What `quire rm` is going to remove."""

    name: str
    cache: Path  # nothing outside is touched
    files: tuple[Path, ...]  # files and links
    trees: tuple[Path, ...]  # directories, with all that is in them
    nbytes: int

    def run(self) -> None:
        for path in self.files:
            path.unlink(missing_ok=True)  # of a link, the link
        for path in self.trees:
            shutil.rmtree(path)  # does not follow links


def plan_removal(name: str, hub: Path) -> Removal:
    """Return what removing a model means. Raises ConfigError for a path, and ModelNotFound for what is not stored."""
    if name in wheel.ALIASES:
        return _alias_removal(name)
    wanted = hub_name(name)
    if wanted is None or Path(name).is_absolute():
        raise ConfigError(
            f"{name!r} is a path, and `quire rm` removes only from the caches, by the names that `quire models --local` lists. "
            "Remove it with rm"
        )
    directory = repository_directory(hub, wanted.repo)
    if directory.is_symlink():
        raise ConfigError(
            f"{directory} is a link to a directory outside the cache, whose files are not removed. Remove the link"
        )
    if ".." in wanted.repo.split("/") or not directory.is_dir():
        raise ModelNotFound(f"{name!r} is not in {hub}; `quire models --local` lists what is")
    return _gguf_removal(name, wanted, hub, directory) if wanted.quant or wanted.file else _whole(name, hub, directory)


def _alias_removal(name: str) -> Removal:
    cache = cache_directory()
    path = cache / wheel.ALIASES[name].file_name
    files = tuple(one for one in (path, path.with_name(f"{path.name}.json"), cache / f"{name}.lock") if os.path.lexists(one))
    if path not in files:
        raise ModelNotFound(f"{name!r} is not in {cache}; `quire models --local` lists what is")
    return Removal(name, cache, files, (), path.lstat().st_size)


def _whole(name: str, hub: Path, directory: Path) -> Removal:
    locks = hub / ".locks" / directory.name
    trees = tuple(path for path in (directory, locks) if path.is_dir() and not path.is_symlink())
    return Removal(name, hub, (), trees, _tree_bytes(directory))


def _tree_bytes(directory: Path) -> int:
    return sum((Path(folder) / file).lstat().st_size for folder, _, files in os.walk(directory) for file in files)


def _gguf_removal(name: str, wanted: HubName, hub: Path, directory: Path) -> Removal:
    chosen: list[Path] = []
    kept: set[Path] = set()  # targets of the links that stay
    weights_left = False
    for snapshot in sorted((directory / "snapshots").glob("*")):
        if snapshot.is_symlink():
            continue
        files = {path.relative_to(snapshot).as_posix(): path for path in snapshot.rglob("*") if not path.is_dir()}
        selected = wanted.select(files)
        chosen += (files[one] for one in selected)
        kept |= {path.resolve() for one, path in files.items() if one not in selected}
        weights_left |= any(path.suffix in WEIGHTS for one, path in files.items() if one not in selected)
    if not chosen:
        raise ModelNotFound(f"{name!r} is not in {hub}; `quire models --local` lists what is")
    if not weights_left:
        return _whole(name, hub, directory)
    blobs = (directory / "blobs").resolve()
    targets = {path.resolve() for path in chosen if path.is_symlink()} - kept
    own = sorted(path for path in targets if path.parent == blobs and path.is_file())  # a link out is removed, not its target
    plain = [path for path in chosen if not path.is_symlink()]
    return Removal(name, hub, (*chosen, *own), (), sum(path.stat().st_size for path in [*own, *plain]))


@contextlib.contextmanager
def claimed_for(removal: Removal) -> Iterator[list[str]]:
    """Keep engines from starting with what is to be removed; yield the processes of this machine that use it."""
    files = [path for tree in removal.trees for path in sorted(tree.rglob("*")) if path.is_file()] + [*removal.files]
    with claimed(path for path in files if path.suffix == ".gguf" or path.name in MARKED_NAMES) as marked:
        users = _users_of(removal)
        yield users or (["a process that cannot be seen from here (another user's, or in a container)"] if marked else [])


def _users_of(removal: Removal) -> list[str]:
    """Return the processes that have opened or mapped these files, as far as this user may see them."""
    tops = tuple(f"{path.resolve()}/" for path in removal.trees)
    files = {str(path.resolve()) for path in removal.files}
    return [
        f"process {process.name} ({_command(process)})"
        for process in sorted(PROC.glob("[0-9]*"), key=lambda path: int(path.name))
        if int(process.name) != os.getpid() and any(path in files or path.startswith(tops) for path in _opened(process))
    ]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:MAX_SHOWN_COMMAND]
    except OSError:
        return "ended"


def _opened(process: Path) -> set[str]:
    """Return the paths of the files that a process has mapped or opened."""
    opened: set[str] = set()
    with contextlib.suppress(OSError):
        opened |= {row.split(maxsplit=5)[5] for row in (process / "maps").read_text().splitlines() if row.count("/")}
    with contextlib.suppress(OSError):
        for path in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                opened.add(str(path.readlink()))
    return opened
