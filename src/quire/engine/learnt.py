"""What an engine found out about drafts, for the next one with the same model on the same device: a file beside what was tried
on a CPU. A file that cannot be read or written, or says what no engine writes, only means finding out again."""

import json
import logging
import os
import stat
import threading
from collections.abc import ItemsView, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.files.wheel import cache_directory

if TYPE_CHECKING:
    from quire.config.config import Config

NAME = "drafts.json"
MOST = 64  # engines; the longest forgotten go
MOST_BYTES = 8 << 20  # of the file
MOST_SIZES = 256  # of steps, by rows and then by drafts: nobody tells so many apart
MOST_COUNTED = 1 << 20  # rows, drafts and outcomes
WAY = 1  # of measuring
WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)  # whatever is in the file

logger = logging.getLogger(__name__)


def open_learnt(config: "Config") -> dict[str, Any]:
    """Of `Speculation`: what is `known`, and where to `remember`. Nothing of a fake, which measures nothing."""
    if config.args.distributed_executor_backend == "fake":
        return {}
    path, key = cache_directory() / NAME, _key(config)
    known, wrong = None, None
    try:
        told = _read(path)
        known = _known(told[key]) if key in told else None
    except FileNotFoundError:
        pass
    except OSError as error:
        wrong = error.strerror or str(error)
    except WRONG:
        wrong = "it does not say what engines write there"
    if wrong is not None:
        logger.warning("%s: %s; what drafts cost here is found out again", path, wrong)
    return {"known": known, "remember": partial(_write, path, key)}


def _key(config: "Config") -> str:
    """Everything that a step's cost depends on, beside the cost of a step without drafts."""
    asked, args = config.speculation, config.args
    parts = (
        WAY, config.device_facts.name, os.cpu_count(), os.environ.get("OMP_NUM_THREADS"), config.facts.files.path.absolute(),
        config.facts.parameters, config.dtype, config.world, config.depth, args.enforce_eager, config.max_loras,
        asked and asked.method, asked and asked.model,
    )  # fmt: skip
    return " | ".join(map(str, parts))


def _known(told: Any) -> dict[str, Any]:
    """Raises one of `WRONG`."""
    costs: dict[int, dict[int, float]] = {}
    for rows, found in _few(told["costs"]):
        costs[_count(rows)] = {_count(drafts): _positive(ratio) for drafts, ratio in _few(found)}
    known: dict[str, Any] = {"costs": costs}
    if "right" in told:
        first, later, outcomes = told["right"]
        known["right"] = _share(first), _share(later), min(max(0, int(outcomes)), MOST_COUNTED)
    return known


def _few(sizes: Any) -> ItemsView[str, Any]:
    if len(sizes) > MOST_SIZES:
        raise ValueError
    items: ItemsView[str, Any] = sizes.items()
    return items


def _count(text: str) -> int:
    if not 1 <= int(text) <= MOST_COUNTED:
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


def _read(path: Path) -> dict[str, Any]:
    """Raises OSError, or one of `WRONG`. Nobody is waited for, as at the end of a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no plain file")
        if found.st_size > MOST_BYTES:
            raise OSError(f"it has {found.st_size:,} bytes; more than {MOST_BYTES:,} are not read")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return dict(json.loads(file.read(MOST_BYTES)))
    finally:
        os.close(descriptor)


def _write(path: Path, key: str, learnt: Mapping[str, Any]) -> None:
    """At once for whoever reads, and of others what they can read. Of two who write together the later one is kept."""
    known: dict[str, Any] = {}
    with suppress(OSError, *WRONG):
        for other, told in _read(path).items():
            with suppress(*WRONG):
                known[other] = _known(told)
    known.pop(key, None)
    known = dict([*known.items(), (key, learnt)][-MOST:])
    own = path.with_suffix(f".{os.getpid()}-{threading.get_native_id()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own.unlink(missing_ok=True)
        try:
            with own.open("x", encoding="utf-8") as file:
                file.write(json.dumps(known, indent=1))
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)
