# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Structured outputs: memory of token masks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.fields import OBJECT, setting
from quire.config.structured import checked_structured_outputs
from quire.features.host import Feature, Memory, Sizes
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config

MASKED_BYTES = 4 + 4 + 1 + 1  # of one token's logit: its copy in float32, the mask's bits in int32, allowed, and not allowed


@dataclass
class StructuredArgs:
    structured_outputs_config: dict[str, Any] = setting(
        {},
        OBJECT,
        "lengths and sampling",
        "backend (auto, guidance, xgrammar); for JSON disable_any_whitespace (false), disable_additional_properties (true)",
        after="logprobs_mode",
    )


class StructuredOutputs(Feature):
    name = "structured"

    def check(self, args: StructuredArgs) -> None:
        args.structured_outputs_config = checked_structured_outputs(args.structured_outputs_config)

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        """Masks are applied when the activations of the step are gone, so only a large vocabulary makes this the peak."""
        drafts = 0 if config.speculation is None else config.speculation.num_speculative_tokens
        rows = min(config.max_batched_tokens, config.max_seqs * (1 + drafts))
        return Memory(step=MASKED_BYTES * rows * config.facts.vocab_size)

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:  # noqa: ARG002
        return ()
