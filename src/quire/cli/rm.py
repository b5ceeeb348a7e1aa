"""`quire rm NAME`: remove a model's files from the caches."""

import argparse
import sys
from typing import Any

from quire.cli.hub_download import hub_directory, megabytes
from quire.cli.model_store import Removal, claimed_for, plan_removal
from quire.types.errors import ConfigError, ModelError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "rm",
        help="remove a model's files from this disk",
        description="Removes a model that `quire models --local` lists: its files in the hub's cache or in Quire's. Nothing "
        "outside the caches is removed, and links are not followed.",
        epilog="exit codes: 0 removed; 1 not removed: not there, in use, or the answer was no; 2 wrong use",
    )
    parser.add_argument("name", metavar="NAME", help="org/repo, org/repo:Q4_K_M, org/repo/FILE.gguf or an alias")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="remove it although a running process uses it")
    parser.add_argument("--download-dir", default=None, metavar="DIR", help="the cache directory, instead of the hub's own")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    removal = plan_removal(namespace.name, hub_directory(namespace.download_dir))
    with claimed_for(removal) as users:
        refuse_if_used(removal, users, namespace.force)
    if not namespace.yes and not _confirmed(removal):
        print("nothing was removed", file=sys.stderr)
        return 1
    with claimed_for(removal) as users:  # an engine may have started since
        refuse_if_used(removal, users, namespace.force)
        try:
            removal.run()
        except OSError as error:
            raise ModelError(f"{error.filename}: cannot be removed: {error.strerror}") from error
    print(f"removed {removal.name}: {megabytes(removal.nbytes)}")
    return 0


def refuse_if_used(removal: Removal, users: list[str], force: bool) -> None:
    if users and not force:
        raise ModelError(
            f"{removal.name!r} is used by {'; '.join(users)}. End it first, or give --force: it cannot restart then"
        )


def _confirmed(removal: Removal) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give --yes")
    try:
        answer = input(f"remove {removal.name}, {megabytes(removal.nbytes)}, from {removal.cache}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")
