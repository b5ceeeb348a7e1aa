"""Recurrent layers: memory of their states."""

from typing import TYPE_CHECKING

from quire.features.host import Feature, Memory, Sizes
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config


class Recurrent(Feature):
    name = "recurrent"

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        """With drafts, each request has a second state to return to when drafts are rejected."""
        return Memory(per_slot=(1 if config.speculation is None else 2) * config.state_bytes)

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:  # noqa: ARG002
        return ()
