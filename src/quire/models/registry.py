"""Build the model of an architecture. A family's module, and torch, are imported when a model needs them."""

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.config.families import cards, class_path, family_of
from quire.config.families.card import Card
from quire.config.families.composites import COMPOSITES
from quire.config.transformers_types import check_model_type
from quire.files.reading import reading
from quire.types.cache import LayerCache
from quire.types.errors import ModelError

NO_CACHE = LayerCache(1, 1)  # placeholder for a model that will be refused

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts
    from quire.models.decoder import Decoder

FALLBACK = "quire.models.fallback:Fallback"
RECOMPUTED = "quire.models.fallback:Recomputed"


def find_family(facts: "ModelFacts") -> Card | None:
    """Return the card of the model, or of the text model of a multimodal one."""
    if facts.architecture not in COMPOSITES:
        return family_of(facts.architecture, facts.hf)
    return next((card for card in cards() if facts.hf.get("model_type") in card.text), None)


def complete_facts(facts: "ModelFacts", impl: str) -> "ModelFacts":
    """Return facts with the cache layers of a model that transformers runs, found by tracing the model.

    The facts of a model that cannot be run stay as they are: `build_model` raises the reason.
    """
    ours = find_family(facts) is not None and impl != "transformers"
    if not ours and impl != "quire" and facts.architecture not in COMPOSITES:
        facts = replace(facts, by_transformers=True)
        try:
            _check_known(facts)
            return importlib.import_module("quire.models.fallback_checks").plan_cache(facts)  # type: ignore[no-any-return]
        except (ModuleNotFoundError, ModelError):
            return replace(facts, layers=(NO_CACHE,), unsupported_reason="") if facts.unsupported_reason else facts
    if facts.unsupported_reason:
        raise ModelError(facts.unsupported_reason)
    return facts


def build_model(facts: "ModelFacts", impl: str = "auto") -> "Decoder":
    """Return the model without its weights: every parameter is on the meta device until `load_weights` fills it.

    impl: "auto" = our own family, else the fallback; "quire" = only our own; "transformers" = only the fallback.
    """
    if impl not in ("auto", "quire", "transformers"):
        raise ModelError(f"unknown model_impl {impl!r}; it must be auto, quire or transformers")
    family = find_family(facts)
    if impl != "transformers" and family is not None:
        return _build(family, facts)
    if facts.architecture in COMPOSITES:
        raise ModelError(_why_not(facts))
    if facts.states:
        raise ModelError(
            f"{facts.architecture} cannot be run through transformers: it has recurrent layers, which only "
            "Quire's own families support; model_impl must be auto or quire"
        )
    unserved = f"no model family serves {facts.architecture} (`quire models` lists them)"
    if impl == "quire":
        raise ModelError(unserved)
    try:
        _check_known(facts)
        return _import(RECOMPUTED if facts.recomputed else FALLBACK)(facts).eval()
    except ModuleNotFoundError as error:
        install = f"transformers cannot be used ({error}); install it with pip install 'quire[transformers]'"
        raise ModelError(f"{unserved}, and {install}" if impl == "auto" else install) from error
    except ModelError as error:
        refusal = f"{facts.architecture} cannot be run through transformers: {error}"
        raise ModelError(f"{unserved}, and {refusal}" if impl == "auto" else refusal) from error


def _check_known(facts: "ModelFacts") -> None:
    """Refuse a model type that transformers does not list before transformers, and torch with it, is imported."""
    check_model_type(facts.hf.get("model_type"), bool(facts.hf.get("auto_map")))


def _build(card: Card, facts: "ModelFacts") -> "Decoder":
    import torch

    kind = _import(class_path(card))

    with reading(facts.files.path, f"its configuration is not valid for {facts.architecture}"), torch.device("meta"):
        try:
            model = kind(facts).eval()
        except KeyError as error:
            lack = f"the configuration of {facts.files.path} lacks {error}, which {facts.architecture} requires"
            raise ModelError(lack) from error
        except ModelError as error:
            raise ModelError(f"{facts.files.path}: {error}") from error
    composite = COMPOSITES.get(facts.architecture)
    if composite is not None or card.weights:
        model.renames = (*(composite.renames if composite is not None else ()), *card.weights, *model.renames)
    return model


def _why_not(facts: "ModelFacts") -> str:
    text, known = facts.hf.get("model_type"), [kind for card in cards() for kind in card.text]
    halves = f"{facts.architecture} is multimodal; only its text model is served, by a family of Quire's own"
    if text not in known:
        return f"{halves}; but its text model of type {text!r} is not supported (supported: {', '.join(known)})"
    return f"{halves}; model_impl must be auto or quire"


def _import(path: str) -> "type[Decoder]":
    from quire.models.decoder import Decoder

    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if module.startswith("quire."):
            raise
        raise ModelError(f"the model class {path} cannot be imported in this process: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Decoder)):
        raise ModelError(f"the model class {path} must be a subclass of quire.models.decoder.Decoder; vLLM's are not supported")
    return found
