"""Recurrent layers: memory of their states."""

from typing import TYPE_CHECKING, Any

from quire.features.host import Conflict, Feature, Memory, Sizes

if TYPE_CHECKING:
    from quire.config.config import Config


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "stages of recurrent layers",
        lambda c: bool(c.facts.states) and c.stages > 1 and c.speculation is not None,
        lambda c: (
            f"pipeline_parallel_size={c.stages} is not supported with the recurrent layers of {c.facts.architecture} with "
            "speculative_config. Use tensor_parallel_size"
        ),
    ),
    Conflict(
        "more ranks than recurrent heads",
        lambda c: c.ranks > min((state.units for state in c.facts.states), default=c.ranks),
        lambda c: (
            f"tensor_parallel_size={c.ranks}: the {c.facts.states[0].units} heads of the recurrent layers of "
            f"{c.facts.architecture} cannot be divided among that many ranks; use at most {c.facts.states[0].units}"
        ),
    ),
)


class Recurrent(Feature):
    name = "recurrent"
    conflicts = CONFLICTS
    part = "quire.features.recurrent.device:RecurrentPart"
    cache_salt = None  # a snapshot is found by the key of the page it belongs to

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        return {"drafts": config.speculation is not None} if config.facts.states else None

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        """With drafts, each request has a second state to return to when drafts are rejected."""
        return Memory(per_slot=(1 if config.speculation is None else 2) * sizes.state)
