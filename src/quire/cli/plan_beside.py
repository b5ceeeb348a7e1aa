"""What an engine holds beside the model itself: whoever drafts, and room for adapters."""

from dataclasses import dataclass

from quire.cli.plan_weights import weights_of
from quire.config.config import Config
from quire.config.draft_heads import DraftHead
from quire.config.facts import DTYPE_BYTES, ModelFacts
from quire.config.memory import activation_bytes
from quire.config.quantization import choose_quantization
from quire.config.speculative import MTP
from quire.engine.layouts import draft_forms, text_drafter_config
from quire.engine.rehearsal import rehearse
from quire.files.safetensors import read_header


@dataclass(frozen=True)
class Beside:
    """Bytes, of all ranks of an engine together."""

    drafter: str = ""  # its name
    by_text: bool = False
    draft_weights: int = 0
    draft_steps: int = 0  # of its largest step, which comes after the model's
    draft_cache: int = 0  # of one that drafts by text; others have a share of the model's
    adapters: int = 0
    held_twice: int = 0

    @property
    def total(self) -> int:
        return self.draft_weights + self.draft_cache + self.adapters + self.held_twice


def what_is_beside(config: Config) -> Beside:
    rehearsed = rehearse(config)
    adapters, twice = rehearsed.adapters, rehearsed.held_twice
    if config.text_drafter is not None:
        facts, own = config.text_drafter, text_drafter_config(config, config.text_drafter)
        weights, _ = weights_of(facts, own.quantization, own.kept_forms, own.dtype)
        cache = own.args.kv_cache_memory_bytes or 0
        return Beside(facts.files.name, True, weights, _steps(own, facts), cache, adapters, twice)
    holders = config.ranks  # it is whole on every rank, of the first stage if there are several
    if config.draft_head is not None:
        head = config.draft_head
        weights = _head_numbers(head) * DTYPE_BYTES[config.dtype] * holders
        return Beside(_name(config, head), False, weights, 0, 0, adapters, twice)
    if config.draft_facts is not None:
        facts = config.draft_facts
        quantization = choose_quantization(None, facts.quantization, facts.files.format == "gguf")
        weights, _ = weights_of(facts, quantization, draft_forms(config, facts) or frozenset(), config.dtype)
        return Beside(facts.files.name, False, weights * holders, _steps(config, facts), 0, adapters, twice)
    return Beside(adapters=adapters, held_twice=twice)


def _name(config: Config, head: DraftHead) -> str:
    return f"{config.facts.files.name}'s own layers" if head.method == MTP else head.facts.files.name


def _head_numbers(head: DraftHead) -> int:
    """A model's own layers are counted with it."""
    if head.method == MTP:
        return 0
    infos = [read_header(path) for path in head.facts.files.weights]
    counted = sum(info.elements for found in infos for info in found.values())
    return counted or (head.facts.parameters if head.facts.layers else 0)


def _steps(config: Config, facts: ModelFacts) -> int:
    return activation_bytes(
        facts.hf, element_bytes=DTYPE_BYTES[config.dtype], tokens=config.max_batched_tokens, rows=config.max_seqs
    )
