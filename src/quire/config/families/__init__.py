"""The registry of model families: the cards of every module in this folder, under `CARDS`, and those of plug-ins."""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

from quire.config.families.card import GGUF, Card, Config
from quire.config.plugins import MODELS, PlugIn, load_all, load_general, refuse
from quire.files.gguf import GGUFHeader
from quire.types.errors import ConfigError, ModelError

_LM_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_registered: list[Card] = []
_failures: list[str] = []  # of plug-ins


@functools.cache
def cards() -> tuple[Card, ...]:
    """Return all cards: Quire's own, those of plug-ins (group `quire.models`), and those registered in this process."""
    load_general()  # they may register some
    return (*_own_cards(), *_plugin_cards(), *_registered)


@functools.cache
def _own_cards() -> tuple[Card, ...]:
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return tuple(card for module in modules for card in getattr(module, "CARDS", ()))


@functools.cache
def _plugin_cards() -> tuple[Card, ...]:
    found: list[Card] = []

    def use(plugin: PlugIn, loaded: Any) -> None:  # noqa: ARG001
        some = tuple(loaded) if isinstance(loaded, tuple | list) else (loaded,)
        for card in some:
            _check(card, (*_own_cards(), *found))
        found.extend(some)

    _failures.extend(load_all(MODELS, use))
    return tuple(found)


def check_plugins(require: bool) -> None:
    """Load the plug-ins. require: raise PlugInError if one of them failed."""
    cards()
    refuse(_failures, require)


def register(card: Card) -> None:
    """Add a card in this process. Raise ConfigError if another card has one of its names."""
    _check(card, cards())
    _registered.append(card)
    forget_tables()


def _check(card: Any, known: Iterable[Card]) -> None:
    if not isinstance(card, Card):
        raise ConfigError(f"it must be a Card or a tuple of Cards; got {type(card).__name__}")
    if not card.architectures or not all(card.model.partition(":")):
        raise ConfigError(f"the card {card.title!r} must have architectures and a model 'module:Class'; got {card.model!r}")
    for other in known:
        shared = sorted(_claimed(card) & _claimed(other))
        if shared:
            what, name = shared[0]
            raise ConfigError(
                f"the model family {card.title!r} ({class_path(card)}) has the {what} {name!r} of the family {other.title!r} "
                f"({class_path(other)}). Give it a name of its own"
            )


def _claimed(card: Card) -> set[tuple[str, str]]:
    """Return the names by which a card is found: (what, name)."""
    gguf = {("GGUF architecture", row.name) for row in card.gguf if row.when is None}
    return {("architecture", name) for name in card.architectures} | {("model_type", kind) for kind in card.types} | gguf


def class_path(card: Card) -> str:
    """Return the class of a card as an absolute "module:Class"."""
    module = card.model.partition(":")[0]
    own = "." not in module and importlib.util.find_spec(f"quire.models.{module}") is not None
    return f"quire.models.{card.model}" if own else card.model


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
