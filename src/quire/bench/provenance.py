"""Where a result comes from: the commit of this Quire, the command line, the date. Secrets stay out."""

import datetime
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from quire import __version__

SECRET_FLAGS = ("--api-key", "--header", "--hf-token")


def provenance(argv: Sequence[str]) -> dict[str, str | None]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(without_secrets(argv)),
        "quire_version": __version__,
        "commit": commit(Path(__file__)),
    }


def commit(file: Path) -> str | None:
    """The commit of the checkout that tracks this file, `-dirty` where it is changed; None where there is none."""
    try:
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        head = _git(file.parent, "rev-parse", "HEAD")
        changed = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def without_secrets(argv: Sequence[str]) -> list[str]:
    shown: list[str] = []
    hidden = False
    for text in argv:
        flag, equals, _ = text.partition("=")
        if text.startswith("--"):
            hidden = flag.replace("_", "-") in SECRET_FLAGS
            shown.append(f"{flag}=..." if hidden and equals else text)
        else:
            shown.append("..." if hidden else text)
    return shown


def _git(directory: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
