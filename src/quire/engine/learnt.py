"""What an engine found out about drafts, for the next one with the same model on the same device: a file beside what was tried
on a CPU. A file that cannot be read or written only means finding out again."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.files.wheel import cache_directory

if TYPE_CHECKING:
    from quire.config.config import Config

NAME = "drafts.json"
MOST = 64  # engines; the longest forgotten go
WAY = 1  # of measuring


def open_learnt(config: "Config") -> dict[str, Any]:
    """Of `Speculation`: what is `known`, and where to `remember`. Nothing of a fake, which measures nothing."""
    if config.args.distributed_executor_backend == "fake":
        return {}
    path, key = cache_directory() / NAME, _key(config)
    return {"known": _known(_read(path).get(key)), "remember": partial(_write, path, key)}


def _key(config: "Config") -> str:
    """Everything that a step's cost depends on, beside the cost of a step without drafts."""
    asked, args = config.speculation, config.args
    parts = (
        WAY, config.device_facts.name, os.cpu_count(), os.environ.get("OMP_NUM_THREADS"), config.facts.files.path.absolute(),
        config.facts.parameters, config.dtype, config.world, config.depth, args.enforce_eager, config.max_loras,
        asked and asked.method, asked and asked.model,
    )  # fmt: skip
    return " | ".join(map(str, parts))


def _known(told: Any) -> dict[str, Any] | None:
    with suppress(TypeError, ValueError, KeyError, AttributeError):
        costs: dict[int, dict[int, float]] = {}
        for rows, found in told["costs"].items():
            costs[int(rows)] = {int(drafts): _positive(ratio) for drafts, ratio in found.items()}
        known: dict[str, Any] = {"costs": costs}
        if "right" in told:
            first, later, outcomes = told["right"]
            known["right"] = _share(first), _share(later), max(0, int(outcomes))
        return known
    return None


def _positive(ratio: Any) -> float:
    if not 0 < float(ratio) < 1e6:
        raise ValueError
    return float(ratio)


def _share(value: Any) -> float:
    if not 0 <= float(value) <= 1:
        raise ValueError
    return float(value)


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads(path.read_text()))
    return {}


def _write(path: Path, key: str, learnt: Mapping[str, Any]) -> None:
    known = _read(path)
    known.pop(key, None)
    known = dict([*known.items(), (key, learnt)][-MOST:])
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(known, indent=1))
        own.replace(path)
