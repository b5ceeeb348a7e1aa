"""From the start of a process to its first token, in processes of their own; what happens inside them is told by themselves.

A cold start finds no compiled kernels: its Triton cache is a new, empty directory. A warm one finds what earlier ones left.
The clock is the machine's, the same for every process on it.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.types.errors import EngineError

KERNEL_CACHE = "TRITON_CACHE_DIR"  # environment
OTHER, OTHER_SHARE = "other", 0.02  # time without a name is shown from this share of the whole on


@dataclass(frozen=True)
class StartupTimes:
    """Seconds since the process was started. `parts` follow each other and add up to `first_token`."""

    cold: bool
    ready: float
    first_token: float
    parts: list[tuple[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def start_once(command: Sequence[str], question: Mapping[str, Any], *, cold: bool) -> StartupTimes:
    """Runs the command, gives it the question as JSON, and takes the last line of its output as the answer:
    `ready` and `first_token` as times of the machine's clock, and the `parts` of the way to ready."""
    with tempfile.TemporaryDirectory(prefix="quire-cold-") as empty:
        environment = {**os.environ, KERNEL_CACHE: empty} if cold else dict(os.environ)
        began = time.monotonic()
        done = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise EngineError(f"the process that was to be started ended with {done.returncode}; its messages are above")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    ready, first_token = said["ready"] - began, said["first_token"] - began
    parts = [(str(name), float(seconds)) for name, seconds in said["parts"]] or [("start to ready", ready)]
    parts.append(("first token", first_token - ready))
    rest = first_token - sum(seconds for _, seconds in parts)
    if rest > OTHER_SHARE * first_token:
        parts.append((OTHER, rest))
    return StartupTimes(cold, ready, first_token, parts)


def startup_figures(starts: Sequence[StartupTimes]) -> dict[str, float]:
    """The first and the mean of the later ones, cold and warm."""
    found: dict[str, float] = {}
    for name, some in (("cold", [s for s in starts if s.cold]), ("warm", [s for s in starts if not s.cold])):
        if some:
            found[f"first_{name}_first_token"] = some[0].first_token
            found[f"mean_{name}_first_token"] = _mean([start.first_token for start in some])
            found[f"mean_{name}_ready"] = _mean([start.ready for start in some])
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
