"""Speculative decoding: memory of draft models and heads."""

from typing import TYPE_CHECKING

from quire.features.host import Feature, Memory, Sizes
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config


class Speculation(Feature):
    name = "speculation"

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        """A draft model is whole on every rank of the first stage."""
        return Memory(
            weights=sizes.draft_weights + sizes.draft_cache,  # a draft model with its own cache allocates it before the profile
            step=sizes.draft_step,
            per_page=sizes.draft_page if config.drafts_on_device else 0,
        )

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:  # noqa: ARG002
        return ()  # drafts do not change the model's keys
