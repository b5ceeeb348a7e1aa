"""The registry of model families: the cards of every module in this folder, under `CARDS`."""

import functools
import importlib
import pkgutil
from collections.abc import Iterator

from quire.config.families.card import GGUF, Card, Config
from quire.files.gguf import GGUFHeader
from quire.types.errors import ModelError

_LM_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_registered: list[Card] = []


@functools.cache
def cards() -> tuple[Card, ...]:
    """Return all cards, registered ones first."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return (*_registered, *(card for module in modules for card in getattr(module, "CARDS", ())))


def register(card: Card) -> None:
    """Add a card, for instance of a family outside this package. It replaces what has the same names."""
    _registered.insert(0, card)
    forget_tables()


def forget_tables() -> None:
    """Make the tables below anew at their next use."""
    for table in (cards, architectures, model_types):
        table.cache_clear()


@functools.cache
def architectures() -> dict[str, Card]:
    """Return the card of each class name that config.json may have under `architectures`."""
    return {name: card for card in reversed(cards()) for name in card.architectures}


@functools.cache
def model_types() -> dict[str, Card]:
    """Return the card of each `model_type`."""
    return {kind: card for card in reversed(cards()) for kind in card.types}


def card_of(config: Config) -> Card | None:
    """Return the card of a config's `model_type`."""
    return model_types().get(str(config.get("model_type")))


def has_lm_head(architecture: str) -> bool:
    """Return whether a class of this name generates tokens, by its family's card or by its name."""
    card = architectures().get(architecture)
    names = (architecture,) if card is None else card.architectures
    return any(name.endswith(_LM_HEADS) for name in names)


def family_of(architecture: str, config: Config) -> Card | None:
    """Return the card of a class, or, if it has another head than an LM head or none, that of its `model_type`."""
    card = architectures().get(architecture)
    return card_of(config) if card is None and not has_lm_head(architecture) else card


def overflows_in_float16(config: Config) -> bool:
    card = card_of(config)
    return card is not None and card.overflows_in_float16


def has_chunked_attention(config: Config) -> bool:
    card = card_of(config)
    return card is not None and card.chunked_attention


def gguf_rows() -> Iterator[tuple[Card, GGUF]]:
    return ((card, row) for card in cards() for row in card.gguf)


def find_gguf(header: GGUFHeader) -> tuple[Card, GGUF]:
    """Return what describes the file; `header` has the tensors of all shards."""
    named = [(card, row) for card, row in gguf_rows() if row.name == header.architecture]
    for card, row in sorted(named, key=lambda found: found[1].when is None):
        if row.when is None or row.when(header):
            return card, row
    known = ", ".join(sorted({row.name for _, row in gguf_rows()}))
    raise ModelError(f"{header.path}: GGUF architecture {header.architecture!r} is not supported; these are: {known}")
