"""Recurrent layers: memory of their states."""

from typing import TYPE_CHECKING, Any

from quire.features.host import Conflict, Feature, Memory, Sizes

if TYPE_CHECKING:
    from quire.config.config import Config


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "ranks of recurrent layers",
        lambda c: bool(c.facts.states) and (c.stages > 1 or (c.world > 1 and (not c.facts.layers or c.device != "cpu"))),
        lambda c: (
            f"{c.parallelism}: the recurrent layers of {c.facts.architecture} cannot be divided; leave it at 1 (on a CPU, and "
            "with attention layers as well, tensor_parallel_size divides all other layers)"
        ),
        "without attention",
        "tensor_parallel_size",
    ),
)  # fmt: skip


class Recurrent(Feature):
    name = "recurrent"
    conflicts = CONFLICTS
    part = "quire.features.recurrent.device:RecurrentPart"
    cache_salt = None  # a snapshot is found by the key of the page it belongs to

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        return {"drafts": config.speculation is not None} if config.facts.states else None

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        """With drafts, each request has a second state to return to when drafts are rejected."""
        return Memory(per_slot=(1 if config.speculation is None else 2) * config.state_bytes)
