"""List a hub repository's files, and fetch large ones into the hub's cache so that a download that was cut off continues.

The cache has the hub library's layout: a file whose ETag is E is `blobs/E`. The library links blobs that it finds there, and
starts a file again that it finds incomplete.
"""

import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.files.resolve import HubName
from quire.progress import doing
from quire.types.errors import ModelError

MIN_RESUMED_BYTES = 8 << 20  # smaller files are fetched by the hub library
CHUNK_BYTES = 1 << 20
READ_TIMEOUT_S = 30.0
RETRY_DELAYS_S = (1.0, 2.0, 5.0, 10.0)  # after attempts that received nothing
INCOMPLETE = ".quire.incomplete"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    name: str
    nbytes: int
    cached: bool


@dataclass(frozen=True)
class Listing:
    """The files of one model in a hub repository, at one commit."""

    repo: str
    commit: str
    cache: Path  # directory of the hub's cache
    files: tuple[HubFile, ...]
    others: tuple[str, ...]  # names of the repository's other files

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def missing(self) -> list[HubFile]:
        return [file for file in self.files if not file.cached]

    @property
    def bytes_to_fetch(self) -> int:
        """Return the size of the missing files without what an earlier attempt stored."""
        stored = sum(file.stat().st_size for file in self.blobs.glob(f"*{INCOMPLETE}"))
        return max(0, sum(file.nbytes for file in self.missing) - stored)

    @property
    def blobs(self) -> Path:
        return repository_directory(self.cache, self.repo) / "blobs"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def hub_directory(download_dir: str | None) -> Path:
    """Return the hub's cache: `download_dir`, or where HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME put it."""
    if download_dir:
        return Path(download_dir).expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_directory(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}"


def list_files(wanted: HubName, revision: str | None, download_dir: str | None, token: str | bool | None) -> Listing:
    """Ask the hub. Raises the hub library's errors."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    cache = hub_directory(download_dir)
    found = HfApi().model_info(wanted.repo, revision=revision, files_metadata=True, token=token)
    sizes = {one.rfilename: one.size or 0 for one in found.siblings or ()}
    commit, names = str(found.sha), wanted.select(sizes)
    files = tuple(
        HubFile(name, sizes[name], isinstance(try_to_load_from_cache(wanted.repo, name, str(cache), revision=commit), str))
        for name in names
    )
    return Listing(wanted.repo, commit, cache, files, tuple(sorted({*sizes} - {*names})))


def check_space(listing: Listing) -> None:
    """Raise ModelError if the disk has no space for what is missing."""
    place = next(path for path in (listing.cache, *listing.cache.absolute().parents) if path.is_dir())
    needed, free = listing.bytes_to_fetch, shutil.disk_usage(place).free
    if needed > free:
        raise ModelError(
            f"{listing.cache} has no space for {listing.repo}: {megabytes(needed)} are missing, {megabytes(free)} are "
            "free. Free some space (`quire models --local`, `quire rm NAME`), or set HF_HOME or --download-dir to another disk"
        )


def fetch_large(listing: Listing, token: str | bool | None) -> None:
    """Fetch the large missing files into the cache's blobs; what an earlier attempt stored is kept."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    large = [file for file in listing.missing if file.nbytes >= MIN_RESUMED_BYTES]
    for number, file in enumerate(large, 1):
        url = hf_hub_url(listing.repo, file.name, revision=listing.commit)
        try:
            about = get_hf_file_metadata(url, token=token)
        except Exception:  # of the hub library and of its HTTP client, whose types differ between versions
            return  # the library meets the same problem, and `resolve_model` reports it
        if about.etag is None or re.fullmatch(r"[\w.-]+", about.etag) is None:
            continue  # the library decides
        headers = _authorization(token)
        if urlsplit(about.location).netloc != urlsplit(url).netloc:  # the token is for the hub only
            headers = {}
        what = f"fetching {file.name} ({number} of {len(large)})"
        _fetch(what, about.location, headers, listing.blobs / about.etag, about.size or file.nbytes)


def _authorization(token: str | bool | None) -> dict[str, str]:
    """Return the header of the hub library's token; token: as in `resolve_model`."""
    from huggingface_hub import constants, get_token

    if token is False or (token is None and constants.HF_HUB_DISABLE_IMPLICIT_TOKEN):
        return {}
    text = token if isinstance(token, str) else get_token()
    return {"authorization": f"Bearer {text}"} if text else {}


def _fetch(what: str, url: str, headers: dict[str, str], target: Path, nbytes: int) -> None:
    partial = target.with_name(target.name + INCOMPLETE)
    with _storing(target), _locked(partial) as out, doing(what, nbytes) as work:
        if target.exists():  # another process has fetched it
            partial.unlink(missing_ok=True)
            return
        digest = hashlib.sha256()
        out.seek(0)
        while chunk := out.read(CHUNK_BYTES):
            digest.update(chunk)
        work.reach(out.tell())
        failures = 0
        while (have := out.tell()) < nbytes:
            try:
                for chunk in _chunks(url, headers, have):
                    out.write(chunk)
                    digest.update(chunk)
                    work.reach(out.tell())
                if out.tell() == have:
                    raise http.client.IncompleteRead(b"", nbytes - have)
            except (http.client.HTTPException, OSError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                full = isinstance(error, OSError) and error.errno == errno.ENOSPC
                failures = failures + 1 if out.tell() == have else 1
                if refused or full or failures > len(RETRY_DELAYS_S):
                    out.flush()
                    raise ModelError(
                        f"{what}: {getattr(error, 'strerror', None) or getattr(error, 'reason', None) or error}, with "
                        f"{out.tell() / 1e6:,.0f} of {nbytes / 1e6:,.0f} MB on disk. Run the command again to continue"
                    ) from error
                time.sleep(RETRY_DELAYS_S[failures - 1])
        out.flush()
        if out.tell() != nbytes or (_SHA256.fullmatch(target.name) and digest.hexdigest() != target.name):
            partial.unlink()
            raise ModelError(f"{what}: what arrived has another size or SHA-256 than the hub's; it was removed. Try again")
        partial.replace(target)


@contextlib.contextmanager
def _storing(target: Path) -> Iterator[None]:
    """Make the directory of a file that is going to be stored; raise ModelError if it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ModelError(
            f"the model cannot be stored in {target.parent}: {error.strerror or error}. Make the directory writable, or set "
            "HF_HOME or --download-dir to another one"
        ) from error


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[Any]:
    """Open an incomplete file for reading and appending. One process has it, others wait."""
    while True:
        with partial.open("a+b") as out:
            with doing(f"waiting for another process that fetches {partial.parent.parent.name}"):
                fcntl.flock(out, fcntl.LOCK_EX)
            if partial.exists() and os.path.samestat(os.fstat(out.fileno()), partial.stat()):
                yield out
                return
            # the file was completed and renamed while this process waited


def _chunks(url: str, headers: dict[str, str], start: int) -> Iterator[bytes]:
    """Yield a file's bytes from `start` on."""
    request = urllib.request.Request(url, headers={**headers, **({"Range": f"bytes={start}-"} if start else {})})
    with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as response:
        if start and response.status != 206:  # a server without ranges sends everything: skip what is there
            left = start
            while left and (skipped := response.read(min(left, CHUNK_BYTES))):
                left -= len(skipped)
        while chunk := response.read(CHUNK_BYTES):
            yield chunk
