# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Speculative decoding: memory of draft models and heads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.fields import NUMBER, OBJECT, TEXT, setting
from quire.config.speculative import SpeculativeConfig, read_speculative
from quire.features.host import Conflict, Feature, Memory, Sizes

if TYPE_CHECKING:
    from quire.config.config import Config


@dataclass
class SpeculationArgs:
    speculative_config: dict[str, Any] | None = setting(
        None,
        OBJECT,
        "speculation",
        "who guesses tokens ahead, so that a step may bring several: method (ngram, suffix, "
        "draft_model, eagle, eagle3, medusa, mtp, synthetic, custom_class or a plug-in's), num_speculative_tokens and more: "
        "speculation.md",
        short="-sc",
        after="async_scheduling",
    )
    spec_method: str | None = setting(
        None,
        TEXT,
        "speculation",
        "speculative_config's method",
        after="speculative_config",
    )
    spec_model: str | None = setting(
        None,
        TEXT,
        "speculation",
        "speculative_config's model",
        after="spec_method",
    )
    spec_tokens: int | None = setting(
        None, NUMBER, "speculation", "speculative_config's num_speculative_tokens", low=0, after="spec_model"
    )

    def speculation(self) -> SpeculativeConfig | None:
        """What speculative_config and its flags ask for together."""
        return read_speculative(self.speculative_config, self.spec_method, self.spec_model, self.spec_tokens)


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "steps planned ahead of drafts",
        lambda c: c.depth > 0 and (c.draft_head is not None or _waits_for_drafts(c)),
        lambda c: (
            f"async_scheduling plans steps before the last one's states are read, but {c.draft_method} "
            "drafts from them; drop async_scheduling, or speculative_config"
        ),
    ),
    Conflict(
        "a draft model that ends early",
        lambda c: c.draft_facts is not None and c.draft_facts.max_position < c.max_model_len,
        lambda c: (
            f"the draft model has {c.draft_facts and c.draft_facts.max_position} positions, fewer than max_model_len "
            f"{c.max_model_len}; lower max_model_len to that, or take another draft model"
        ),
    ),
    Conflict(
        "drafts by text without one",
        lambda c: c.text_drafter is not None and c.args.skip_tokenizer_init,
        lambda c: (
            f"the draft model {c.speculation and c.speculation.model!r} has another vocabulary and drafts by text, for which "
            "both tokenizers are needed; drop skip_tokenizer_init, or take a draft model with the same vocabulary"
        ),
    ),
    Conflict(
        "more drafts than a step has room for",
        lambda c: c.speculation is not None and c.speculation.num_speculative_tokens >= c.scheduled_tokens,
        lambda c: (
            f"num_speculative_tokens {c.speculation and c.speculation.num_speculative_tokens} and a token before them do not "
            f"fit a step of {c.step_limit_name} {c.scheduled_tokens}. Lower the first or raise the second"
        ),
    ),
    Conflict(
        "drafts of stages",
        lambda c: c.stages > 1 and c.draft_head is not None and bool(c.draft_head.taps),
        lambda c: (
            f"speculative_config.method {c.draft_method} is not supported with {c.parallelism}: it reads the "
            "states of layers that other stages have. Take another method, or divide the model by tensor_parallel_size"
        ),
    ),
    Conflict(
        "drafts of recurrent layers",
        lambda c: c.speculation is not None and bool(c.facts.states) and (c.drafts_on_device or c.device != "cpu"),
        lambda c: (
            f"speculative_config.method {c.draft_method} is not supported with {c.facts.architecture} on "
            f"{c.device}: its recurrent state can be restored after rejected drafts only if the host drafts, on a CPU. "
            + ('Take {"method": "ngram"} or {"method": "suffix"}' if c.device == "cpu" else "Leave speculative_config out")
        ),
    ),
    Conflict(
        "drafts by recurrent layers",
        lambda c: c.draft_facts is not None and bool(c.draft_facts.states),
        lambda c: (
            f"the draft model {c.draft_facts and c.draft_facts.architecture} has recurrent layers, whose states cannot be "
            "restored after rejected drafts; take another draft model, or let it draft by text (use_heterogeneous_vocab: true)"
        ),
    ),
)  # fmt: skip


class SpeculativeDecoding(Feature):
    name = "speculation"
    conflicts = CONFLICTS
    cache_salt = None  # drafts do not change the model's keys and values

    def check(self, args: SpeculationArgs) -> None:
        args.speculation()

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        """A draft model is whole on every rank of the first stage."""
        return Memory(
            weights=sizes.draft_weights + sizes.draft_cache,  # a draft model with its own cache allocates it before the profile
            step=sizes.draft_step,
            per_page=sizes.draft_page if config.drafts_on_device else 0,
        )


def _waits_for_drafts(config: "Config") -> bool:
    """Return whether several ranks wait for a draft model after each step."""
    return (config.world > 1 and config.drafts_on_device) or (config.stages > 1 and config.text_drafter is not None)
