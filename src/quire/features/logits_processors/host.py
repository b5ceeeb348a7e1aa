# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Logits processors: the argument, conflicts and memory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.classes import as_name, shown_name
from quire.config.fields import CLASSES, setting
from quire.config.plugins import LOGITS_PROCESSORS, find_plugins
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.types.errors import NotSupported

if TYPE_CHECKING:
    from quire.config.config import Config

NAME = "logits_processors"
COPIES = 2  # of the logits of a batch: rows in the order of the batch, and what a processor returns


@dataclass
class LogitsProcessorArgs:
    logits_processors: list[Any] = setting(
        [], CLASSES, "lengths and sampling", "logits processors: classes, or module:Class, with vLLM's interface",
        after="logprobs_mode",
    )  # fmt: skip


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "logits processors with drafts",
        lambda c: bool(c.args.logits_processors) and c.speculation is not None,
        lambda c: f"{NAME} is not supported with speculation ({c.draft_method}). Remove one of them",
    ),
    Conflict(
        "logits processors of pooling models",
        lambda c: bool(c.args.logits_processors) and "pooling" in c.features,
        lambda c: f"{NAME} is not supported with pooling models such as {c.facts.architecture}. Remove it",
    ),
)


class LogitsProcessors(Feature):
    name = NAME
    conflicts = CONFLICTS
    part = "quire.features.logits_processors.device:LogitsProcessorsPart"
    cache_salt = None  # keys and values do not depend on logits

    def check(self, args: LogitsProcessorArgs) -> None:
        args.logits_processors = [as_name(NAME, each) for each in args.logits_processors]

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        return {"config": config} if has_processors(config) else None  # processors get all of it

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        if not has_processors(config):
            return NO_MEMORY
        return Memory(reserved=reserved_bytes(config.max_seqs, config.facts.vocab_size + config.adapter_tokens))


def has_processors(config: "Config") -> bool:
    """Return whether the engine has logits processors; those of packages are left out where they are not supported."""
    if config.args.logits_processors:
        return True
    return config.speculation is None and "pooling" not in config.features and bool(find_plugins(LOGITS_PROCESSORS))


def refuse_beam_search(config: "Config", parameter: str) -> None:
    """Raise NotSupported if the engine has logits processors: beams are one-token requests, chosen by logprobs before them."""
    if not has_processors(config):
        return
    named = [shown_name(each) for each in config.args.logits_processors]
    packages = [str(plugin) for plugin in find_plugins(LOGITS_PROCESSORS).values()]
    remedy = " Leave out those of packages with QUIRE_PLUGINS" if packages else " Start without them"
    raise NotSupported(
        f"beam search is not supported with logits processors ({', '.join([*packages, *named])}).{remedy}", parameter
    )


def reserved_bytes(max_seqs: int, vocabulary: int) -> int:
    return COPIES * max_seqs * vocabulary * 4
