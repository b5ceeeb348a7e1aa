"""Speculation of an engine: drafters of the host, the expected cost of drafts, and a file of measured costs.

Importing this file does not import torch.
"""

import logging
import os
import time
from collections.abc import Callable, ItemsView, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.facts import ModelFacts
from quire.engine.draft_by_text import TextDrafter
from quire.engine.layouts import text_drafter_config
from quire.engine.timeline import Stopwatch
from quire.files.cache import STORE_ERRORS, cache_directory, read_json_store, store_problem, write_json_store
from quire.models.registry import complete_facts
from quire.sched.draft.ahead import SpeculationAhead
from quire.sched.draft.costs import A_CPU, Prior
from quire.sched.draft.drafters import make_drafter
from quire.sched.draft.speculation import Speculation

if TYPE_CHECKING:
    from quire.config.config import Config
    from quire.engine.assemble import StartedCore

NAME = "drafts.json"
MAX_ENGINES = 64  # in the file; the oldest are dropped
MAX_SIZES = 256  # step sizes, by rows and by drafts
MAX_COUNT = 1 << 20  # of rows, drafts and outcomes
VERSION = 1  # of the measurement

logger = logging.getLogger(__name__)
# measured on an H200 with an 8B model
GPU_RIDGE = 150.0  # tokens of a step up to which its time is constant
GPU_WAIT = 0.25  # of a step: the host's time between steps that are not planned ahead
GPU_LEAST_LAYER = 0.2  # of a layer of the target model: the time of the smallest draft layer
DRAFT_LAUNCH = 0.05  # of a step: the time to launch a drafter, however small


def open_acceptance_store(config: "Config") -> dict[str, Any]:
    """Return arguments of Speculation: `known` measurements and `remember`, which stores new ones in a file.

    The file is for the next engine with the same model and device. A fake executor has none.
    """
    if config.args.distributed_executor_backend == "fake":
        return {}
    path, key = cache_directory() / NAME, _key(config)
    known = None
    try:
        stored = read_json_store(path)
        known = _known(stored[key]) if key in stored else None
    except FileNotFoundError:
        pass
    except (OSError, *STORE_ERRORS) as error:
        logger.warning("%s: %s; costs of drafts are measured again", path, store_problem(error))
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


def _known(stored: Any) -> dict[str, Any]:
    """Return checked values. Raises one of `STORE_ERRORS`."""
    costs: dict[int, dict[int, float]] = {}
    for rows, found in _checked_items(stored["costs"]):
        costs[_count(rows)] = {_count(drafts): _positive(ratio) for drafts, ratio in _checked_items(found)}
    known: dict[str, Any] = {"costs": costs}
    if "right" in stored:
        first, later, outcomes = stored["right"]
        known["right"] = _share(first), _share(later), min(max(0, int(outcomes)), MAX_COUNT)
    return known


def _checked_items(sizes: Any) -> ItemsView[str, Any]:
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


def _write(path: Path, key: str, measured: Mapping[str, Any]) -> None:
    """Add the entry to the file."""
    known: dict[str, Any] = {}
    with suppress(OSError, *STORE_ERRORS):
        for other, stored in read_json_store(path).items():
            with suppress(*STORE_ERRORS):
                known[other] = _known(stored)
    known.pop(key, None)
    write_json_store(path, dict([*known.items(), (key, measured)][-MAX_ENGINES:]))


def make_speculation(config: Config, watch: Stopwatch, start: "Callable[[Config], StartedCore]") -> Speculation | None:
    """Return the speculation of the scheduler; None: there is none. start: starts the engine of a drafter by text."""
    asked = config.speculation
    weighted = config.drafts_on_device or config.text_drafter is not None
    if asked is None or (weighted and config.args.distributed_executor_backend == "fake"):
        return None
    options: dict[str, Any] = {
        "adaptive": asked.adaptive,
        "largest_batch": asked.disable_by_batch_size,
        "schedule": asked.num_speculative_tokens_per_batch_size,
        "prior": expected_costs(config),
        **open_acceptance_store(config),
    }
    when = 'where they pay off; set "adaptive": false in speculative_config to draft always' if asked.adaptive else "always"
    most = asked.num_speculative_tokens
    logger.info("speculation: method %s, at most %d draft tokens per request, %s", asked.method, most, when)
    if weighted:
        drafter = None if config.text_drafter is None else start_text_drafter(config, config.text_drafter, start)
        watch.lap("draft model")
        return SpeculationAhead(drafter, most, **options)
    return Speculation(make_drafter(asked, config.facts.vocab_size), most, **options)


def expected_costs(config: Config) -> Prior:
    """Return what drafts cost before any were measured.

    A draft model takes its share of the parameters of a step's time, but per layer at least what a launch takes. On a GPU rows
    that run together cost what one does.
    """
    overlaps, facts, layers = config.device_facts.overlaps, config.draft_facts or config.text_drafter, len(config.facts.layers)
    guess = reading = 0.0
    if facts is not None:
        reading = facts.parameters / max(1, config.facts.parameters)
        guess = DRAFT_LAUNCH + max(reading, GPU_LEAST_LAYER * len(facts.layers) / max(1, layers) if overlaps else 0.0)
    elif config.draft_head is not None:
        reading = 1 / max(1, layers)
        guess = DRAFT_LAUNCH + reading
    wait = GPU_WAIT if config.depth else 0.0
    each = 0.0 if overlaps else guess
    return Prior(GPU_RIDGE if overlaps else A_CPU.ridge, wait, guess, each, min(1.0, reading))


def start_text_drafter(config: Config, facts: ModelFacts, start: "Callable[[Config], StartedCore]") -> TextDrafter:
    """Start a second engine, whose model has another vocabulary, and draft by its text."""
    from quire.text.tokenizer_files import load_tokenizer, read_tokenizer

    args, path, began = config.args, facts.files.path.absolute(), time.monotonic()
    own, other = (
        load_tokenizer(config.facts.files, tokenizer=args.tokenizer, revision=args.tokenizer_revision),
        read_tokenizer(path),
    )
    started = start(text_drafter_config(config, facts, partial(complete_facts, impl=EngineArgs.model_impl)))
    end = own.eos_token_id if own.eos_token_id in config.facts.eos_ids else next(iter(config.facts.eos_ids), None)
    vocabularies = config.facts.vocab_size, facts.vocab_size
    logger.info(
        "%s drafts by text: vocabulary of %d tokens, the target model's has %d; started in %.1f s",
        path.name, facts.vocab_size, config.facts.vocab_size, time.monotonic() - began,
    )  # fmt: skip
    return TextDrafter(started.core, started.max_model_len, frozenset(facts.eos_ids), (own, other), vocabularies, end)
