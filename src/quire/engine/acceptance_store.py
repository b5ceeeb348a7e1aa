"""A file with measured costs and acceptance rates of drafts, for the next engine with the same model and device
(`files/kept.py`)."""

import logging
import os
from collections.abc import ItemsView, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.files.kept import WRONG, read_kept, what_is_wrong, write_kept
from quire.files.wheel import cache_directory

if TYPE_CHECKING:
    from quire.config.config import Config

NAME = "drafts.json"
MAX_ENGINES = 64  # in the file; the oldest are dropped
MAX_SIZES = 256  # step sizes, by rows and by drafts
MAX_COUNT = 1 << 20  # of rows, drafts and outcomes
VERSION = 1  # of the measurement

logger = logging.getLogger(__name__)


def open_acceptance_store(config: "Config") -> dict[str, Any]:
    """Return arguments of Speculation: `known` measurements, and `remember` to store new ones. A fake executor has none."""
    if config.args.distributed_executor_backend == "fake":
        return {}
    path, key = cache_directory() / NAME, _key(config)
    known = None
    try:
        told = read_kept(path)
        known = _known(told[key]) if key in told else None
    except FileNotFoundError:
        pass
    except (OSError, *WRONG) as error:
        logger.warning("%s: %s; costs of drafts are measured again", path, what_is_wrong(error))
    return {"known": known, "remember": partial(_write, path, key)}


def _key(config: "Config") -> str:
    """Return a key of everything that the relative cost of drafts depends on."""
    asked, args = config.speculation, config.args
    parts = (
        VERSION, config.device_facts.name, os.cpu_count(), os.environ.get("OMP_NUM_THREADS"),
        config.facts.files.path.absolute(), config.facts.parameters, config.dtype, config.world, config.depth,
        args.enforce_eager, config.max_loras,
        asked and asked.method, asked and asked.model,
    )  # fmt: skip
    return " | ".join(map(str, parts))


def _known(told: Any) -> dict[str, Any]:
    """Return checked values. Raises one of `WRONG`."""
    costs: dict[int, dict[int, float]] = {}
    for rows, found in _few(told["costs"]):
        costs[_count(rows)] = {_count(drafts): _positive(ratio) for drafts, ratio in _few(found)}
    known: dict[str, Any] = {"costs": costs}
    if "right" in told:
        first, later, outcomes = told["right"]
        known["right"] = _share(first), _share(later), min(max(0, int(outcomes)), MAX_COUNT)
    return known


def _few(sizes: Any) -> ItemsView[str, Any]:
    if len(sizes) > MAX_SIZES:
        raise ValueError
    items: ItemsView[str, Any] = sizes.items()
    return items


def _count(text: str) -> int:
    if not 1 <= int(text) <= MAX_COUNT:
        raise ValueError
    return int(text)


def _positive(ratio: Any) -> float:
    if not 0 < float(ratio) < 1e6:
        raise ValueError
    return float(ratio)


def _share(value: Any) -> float:
    if not 0 <= float(value) <= 1:
        raise ValueError
    return float(value)


def _write(path: Path, key: str, learnt: Mapping[str, Any]) -> None:
    """Add the entry to those of other engines in the file."""
    known: dict[str, Any] = {}
    with suppress(OSError, *WRONG):
        for other, told in read_kept(path).items():
            with suppress(*WRONG):
                known[other] = _known(told)
    known.pop(key, None)
    write_kept(path, dict([*known.items(), (key, learnt)][-MAX_ENGINES:]))
