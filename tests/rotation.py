"""Which part of a large table of tests this commit runs: another one with every commit, all of it with QUIRE_MATRIX=all."""

import os
import random
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
ALL = os.environ.get("QUIRE_MATRIX") == "all"


def _seed() -> str:
    """The commit, or the day where there is none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        found = None
    return found.stdout.strip() if found is not None and found.returncode == 0 else str(datetime.now(UTC).date())


def sample(items: Sequence[Item], count: int) -> list[Item]:
    """So many of them, in their order."""
    if ALL or count >= len(items):
        return list(items)
    chosen = set(random.Random(_seed()).sample(range(len(items)), count))
    return [item for index, item in enumerate(items) if index in chosen]
