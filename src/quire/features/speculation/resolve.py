"""Find the draft model or head that speculative_config asks for, and read its files."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.config.draft_heads import DraftHead, find_method, read_head
from quire.config.facts import ModelFacts, read_facts
from quire.config.speculative import DRAFT_MODEL, ON_DEVICE, SpeculativeConfig
from quire.files.identity import same_tokens
from quire.files.resolve import resolve_model, with_weights_on_disk
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.args import EngineArgs


@dataclass(frozen=True)
class DraftSource:
    """What proposes draft tokens; at most one of the last three is set."""

    asked: SpeculativeConfig | None = None
    facts: ModelFacts | None = None  # of a draft model with the same vocabulary
    by_text: ModelFacts | None = None  # of a draft model with another vocabulary
    head: DraftHead | None = None

    @property
    def models(self) -> list[ModelFacts]:
        """Return the facts of the draft model or head, if it has files of its own."""
        head = None if self.head is None else self.head.facts
        return [each for each in (self.facts, self.by_text, head) if each is not None]


def find_drafting(args: "EngineArgs", facts: ModelFacts, fetch: bool, weights: bool) -> DraftSource:
    """Return what drafts. The files of a draft model decide the method and the number of drafts where the user did not.

    fetch: download a hub model; otherwise only weights that are on disk are looked at
    weights: weight files are needed, not only the configuration
    """
    asked = args.speculation()
    if asked is None or asked.method not in ON_DEVICE:
        return DraftSource(asked)
    files = None
    if asked.model is not None:
        files = resolve_model(
            asked.model,
            revision=asked.revision,
            download_dir=args.download_dir,
            token=args.hf_token,
            weights=fetch and weights,
        )
        files = files if fetch else with_weights_on_disk(files)
        if "method" not in asked.explicit:
            asked = replace(asked, method=find_method(asked, files))
    if asked.method == DRAFT_MODEL:
        assert files is not None
        found = read_facts(files, {})
        alike = found.vocab_size == facts.vocab_size or same_tokens(found.files, facts.files)
        if asked.use_heterogeneous_vocab or (asked.use_heterogeneous_vocab is None and not alike):
            return DraftSource(asked, by_text=found)
        return DraftSource(asked, check_draft(asked, found, facts, alike))
    head = read_head(asked, files, facts)
    if "num_speculative_tokens" not in asked.explicit and head.tokens is not None:
        asked = replace(asked, num_speculative_tokens=head.tokens)
    if asked.num_speculative_tokens > head.most:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens {asked.num_speculative_tokens} is more than the {head.most} heads of "
            f"{asked.model!r} draft"
        )
    if head.facts.layers and all(layer.kind != "full" for layer in facts.layers):
        raise ConfigError(
            f"speculative_config.method {asked.method!r}: its layers attend to everything, and none of the model's do; only "
            "models that have such layers can have it"
        )
    return DraftSource(asked, head=head)


def check_draft(asked: SpeculativeConfig, found: ModelFacts, facts: ModelFacts, alike: bool) -> ModelFacts:
    """Return the facts of a draft model that can draft for this model. alike: both have the same tokens."""
    if not alike:
        raise ConfigError(
            f"speculative_config.model {asked.model!r} has {found.vocab_size} tokens, but the model has {facts.vocab_size}: "
            "drop use_heterogeneous_vocab=false to have it draft by text, or take one with the same vocabulary"
        )
    if any(layer.kind != "full" for layer in found.layers) or all(layer.kind != "full" for layer in facts.layers):
        raise ConfigError(
            f"speculative_config.model {asked.model!r}: only models whose layers attend to everything can draft, for "
            "models that have such layers"
        )
    return found
