"""Which part of a large table of tests runs: a fixed core and what the latest changes concern; all of it with QUIRE_MATRIX=all.

Changes are those since the branch left main or, on main, those of the last commits. In a clone without history the core runs
alone, and also where more than MAX_CHANGED_FILES have changed: then everything is concerned, which is for QUIRE_MATRIX=all. The
same files select the same tests on every machine.
"""

import functools
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from quire.config.families import architectures

Item = TypeVar("Item")
ALL = os.environ.get("QUIRE_MATRIX") == "all"
ROOT = Path(__file__).parent.parent
RECENT_COMMITS = 10  # on main
MAX_CHANGED_FILES = 120  # of about 650
# files of src/quire -> the columns of the matrix (matrix_cells.py) that run them
COLUMNS_OF: Mapping[str, tuple[str, ...]] = {
    r"lora|adapt": ("LoRA",),
    r"specul|draft": ("speculation",),
    r"quant|packed|ops/native": ("int4",),
    r"grammar|structured": ("grammar",),
    r"^dist/|executor|shard|proc/": ("tp 2", "engine restart"),
    r"^engine/|async_llm": ("engine restart", "batched"),
    r"^sched/": ("preemption", "chunks of 1", "chunks of 7", "batched"),
    r"^cache/": ("prefix hit", "preemption", "n > 1"),
    r"pool": ("pooling",),
    r"sampl": ("seeded sampling", "n > 1"),
    r"^attn/|^layers/|^runner/|^models/(decoder|blocks|hybrid)|^ops/|^device/": (
        "alone",
        "batched",
        "chunks of 7",
        "prefix hit",
    ),
    r"^load/|^config/": ("alone",),
}


def git(*arguments: str) -> str | None:
    """Return the output of a git command, or None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def changed_files() -> frozenset[str]:
    """Paths below src/quire that differ from where the branch left main or, on main, from RECENT_COMMITS ago."""
    head = git("rev-parse", "HEAD")
    bases = [git("merge-base", "HEAD", branch) for branch in ("main", "origin/main")]
    base = next((base for base in bases if base and base != head), None) or git("rev-parse", f"HEAD~{RECENT_COMMITS}")
    changed = git("diff", "--name-only", base, "--", "src/quire") if base else None
    paths = (changed or "").splitlines()
    return frozenset(path.removeprefix("src/quire/") for path in paths if len(paths) <= MAX_CHANGED_FILES)


def changed_columns(paths: Iterable[str]) -> set[str]:
    return {name for path in paths for pattern, names in COLUMNS_OF.items() if re.search(pattern, path) for name in names}


def changed_architectures(paths: Iterable[str]) -> set[str]:
    """Return the architectures whose model is in one of these files."""
    changed = set(paths)
    return {name for name, card in architectures().items() if f"models/{card.model.partition(':')[0]}.py" in changed}


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return count of them, evenly spaced."""
    return [items[i * len(items) // count] for i in range(count)] if count < len(items) else list(items)


def select(names: Sequence[str], families: Mapping[str, object], core: int, changed: int) -> list[str]:
    """Return names of families in their order: evenly spaced ones, and up to `changed` whose model has changed."""
    if ALL:
        return list(names)
    concerned_by = changed_architectures(changed_files())
    concerned = [name for name in names if getattr(families[name], "architecture", None) in concerned_by]
    chosen = {*spread(names, core), *spread(concerned, changed)}
    return [name for name in names if name in chosen]
