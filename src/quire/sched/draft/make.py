"""Drafters by name, ours and others'."""

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from quire.config.speculative import CUSTOM, NAME, NGRAM, SUFFIX, SYNTHETIC, SpeculativeConfig, brought_drafters
from quire.sched.draft.base import HostDrafter, Text
from quire.sched.draft.ngram import NgramDrafter
from quire.sched.draft.suffix import SuffixDrafter
from quire.sched.draft.synthetic import SyntheticDrafter
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)


def make_drafter(config: SpeculativeConfig, vocabulary: int) -> HostDrafter:
    if config.method == NGRAM:
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == SUFFIX:
        return SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    if config.method == SYNTHETIC:
        return SyntheticDrafter(config.synthetic_acceptance_rates, vocabulary)
    where = str(config.model) if config.method == CUSTOM else brought_drafters()[config.method].value
    return Guarded(where, _load(config, where), vocabulary)


def _load(config: SpeculativeConfig, where: str) -> HostDrafter:
    """The class is called with nothing."""
    module, _, name = where.partition(":") if ":" in where else where.rpartition(".")
    try:
        if not module or not name:
            raise ConfigError("it is not of the form 'package.module:Class'")
        drafter: Any = getattr(importlib.import_module(module), name)()
        if not callable(getattr(drafter, "propose", None)):
            raise ConfigError("it has no method propose(text, most)")
    except Exception as error:
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{NAME}: the drafter {where!r} of method {config.method!r} cannot be used: {why}") from error
    made: HostDrafter = drafter
    return made


class Guarded:
    """Another package's drafter. Whatever it does wrong is told once, and then there are no drafts: no answer is touched."""

    def __init__(self, name: str, drafter: HostDrafter, vocabulary: int) -> None:
        self._name, self._drafter, self._vocabulary = name, drafter, vocabulary
        self._broken = False

    def propose(self, text: Text, most: int) -> Sequence[int]:
        if self._broken:
            return ()
        try:
            lent = Text(text.tokens[:], text.prompt, text.scope)
            drafts = [int(token) for token in self._drafter.propose(lent, most)][:most]
            if drafts and not 0 <= min(drafts) <= max(drafts) < self._vocabulary:
                raise ValueError(f"it drafted {drafts}, but tokens are from 0 to {self._vocabulary - 1}")
        except Exception:
            logger.exception("the drafter %s failed; there are no drafts any more", self._name)
            self._broken = True
            return ()
        return drafts

    def finished(self, text: Text) -> None:
        told = getattr(self._drafter, "finished", None)
        if self._broken or told is None:
            return
        try:
            told(text._replace(tokens=text.tokens[:]))
        except Exception:
            logger.exception("the drafter %s failed; there are no drafts any more", self._name)
            self._broken = True
