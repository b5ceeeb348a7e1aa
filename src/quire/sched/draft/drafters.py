"""Drafters on the host: n-gram, suffix, synthetic, and a class of the user's; `make_drafter` chooses one."""

import importlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.config.speculative import CUSTOM, NAME, NGRAM, SUFFIX, SYNTHETIC, SpeculativeConfig, plugin_drafters
from quire.types.errors import ConfigError

Longs = npt.NDArray[np.int64]


class Text(NamedTuple):
    tokens: "array[int]"  # prompt and output; read-only, and not to be stored
    prompt: int  # length of the prompt
    scope: tuple[str, ...]  # data of a text may be used for texts of the same scope only


class HostDrafter(Protocol):
    def propose(self, text: Text, most: int) -> Sequence[int]:
        """Return up to `most` likely next tokens. Called whenever the text has grown, so it must be fast."""

    def finished(self, text: Text) -> None:
        """Handle the end of a text."""


class BatchDrafter(Protocol):
    """A slow drafter, which is called for all texts of a step together, and only if that pays."""

    def propose_all(self, texts: Mapping[str, Text], most: int) -> Mapping[str, Sequence[int]]:
        """Return up to `most` next tokens by text name. A text only grows."""

    def leave(self, name: str) -> None:
        """Handle the end of a text."""

    def idle(self) -> bool:
        """Use idle time. Return False if there is nothing to prepare."""

    def close(self) -> None:
        """Free memory."""


def matches(tokens: npt.NDArray[np.int32], least: int, most: int) -> tuple[Longs, int]:
    """Find earlier occurrences of the last tokens: return the positions after them, rising, and the length of the match.

    All positions have the longest match of `least` to `most` tokens; without a match there are none, and the length is 0.
    """
    none = np.empty(0, np.int64)
    if len(tokens) <= least:
        return none, 0
    last = len(tokens) - 1
    places: Longs = np.flatnonzero(tokens[:last] == tokens[last])  # of a last token
    length = 1
    while len(places) and length < min(most, last):
        places_before = places[places >= length]
        longer = places_before[tokens[places_before - length] == tokens[last - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return (places + 1, length) if len(places) and length >= least else (none, 0)


class NgramDrafter:
    def __init__(self, least: int, most: int) -> None:
        """Match the `least` to `most` last tokens; a longer match is preferred."""
        self._least, self._most = least, most

    def propose(self, text: Text, most: int) -> Sequence[int]:
        tokens = np.frombuffer(text.tokens, np.int32)  # the array cannot grow while this view exists
        places, _ = matches(tokens, self._least, self._most)
        if not len(places):
            return ()
        drafts: list[int] = tokens[int(places[-1]) :][:most].tolist()  # the continuation of the latest occurrence
        return (drafts * most)[:most]  # a match at the end of the text is a loop: repeat it

    def finished(self, text: Text) -> None:
        """Nothing is stored."""


MAX_STORED_TOKENS = 1 << 18  # of all scopes: about 50 MB with the index
MAX_SCOPES = 1024
MAX_MATCHES = 128
GAP = -1  # between two outputs


class Generation:
    """Concatenated outputs, and the positions of each pair of tokens."""

    def __init__(self) -> None:
        self.tokens = array("i", [GAP])
        self.latest: dict[int, int] = {}  # pair -> the position after its last occurrence
        self.before = array("i", [0])  # [tokens] position after a pair -> the previous one; 0: none
        self.texts = 0

    def add(self, output: "array[int]") -> None:
        self.texts += 1
        start = len(self.tokens)
        self.tokens.extend(output)
        self.tokens.append(GAP)
        self.before.extend([0] * (len(output) + 1))
        for i in range(1, len(output)):
            pair, place = output[i - 1] << 32 | output[i], start + i + 1
            self.before[place] = self.latest.get(pair, 0)
            self.latest[pair] = place

    def places(self, first: int, second: int) -> list[int]:
        """Return the latest positions after these two tokens, falling."""
        place, found = self.latest.get(first << 32 | second, 0), list[int]()
        while place and len(found) < MAX_MATCHES:
            found.append(place)
            place = self.before[place]
        return found


class Scope:
    def __init__(self) -> None:
        self.young, self.old = Generation(), Generation()

    @property
    def size(self) -> int:
        return len(self.young.tokens) + len(self.old.tokens)

    def add(self, output: "array[int]", most_texts: int, most_tokens: int) -> None:
        self.young.add(output)
        if 2 * self.young.texts >= most_texts or 2 * len(self.young.tokens) >= most_tokens:
            self.young, self.old = Generation(), self.young


class SuffixDrafter:
    def __init__(self, depth: int, texts: int, factor: float, least: float, most_tokens: int = MAX_STORED_TOKENS) -> None:
        """Create a drafter.

        depth: maximum of compared tokens, and of drafts; texts: outputs stored per scope, or 0
        factor: drafts per matched token; least: minimum probability of a draft
        """
        self._depth, self._texts, self._factor, self._least, self._most_tokens = depth, texts, factor, least, most_tokens
        self._scopes: OrderedDict[tuple[str, ...], Scope] = OrderedDict()

    def propose(self, text: Text, most: int) -> Sequence[int]:
        most = min(most, self._depth)
        tokens = np.frombuffer(text.tokens, np.int32)  # the array cannot grow while this view exists
        places, length = matches(tokens, 1, self._depth)
        best = self._walk(tokens, places[-MAX_MATCHES:], length, most)
        scope = self._scopes.get(text.scope)
        for generation in () if scope is None or len(tokens) < 2 else (scope.young, scope.old):
            places, equal = self._find(generation, tokens)
            if equal > length or (equal and equal == length and not best):
                found = self._walk(np.frombuffer(generation.tokens, np.int32), places, equal, most)
                best, length = (found, equal) if found else (best, length)
        return best

    def finished(self, text: Text) -> None:
        output = text.tokens[text.prompt :]
        if len(output) < 2 or not self._texts:
            return
        scope = self._scopes.setdefault(text.scope, Scope())
        self._scopes.move_to_end(text.scope)
        scope.add(output[: self._most_tokens // 4], self._texts, self._most_tokens)
        size = sum(each.size for each in self._scopes.values())
        while len(self._scopes) > 1 and (size > self._most_tokens or len(self._scopes) > MAX_SCOPES):
            size -= self._scopes.popitem(last=False)[1].size

    def _find(self, generation: Generation, tokens: npt.NDArray[np.int32]) -> tuple[Longs, int]:
        """Return the latest positions after the longest suffix of the text in stored outputs, and its length."""
        places, length = np.array(generation.places(int(tokens[-2]), int(tokens[-1])), np.int64), 2
        if not len(places):
            return places, 0
        stored = np.frombuffer(generation.tokens, np.int32)
        while length < min(self._depth, len(tokens)):
            longer = places[stored[np.maximum(places - length - 1, 0)] == tokens[-length - 1]]
            if not len(longer):
                break
            places, length = longer, length + 1
        return places, length

    def _walk(self, tokens: npt.NDArray[np.int32], places: Longs, length: int, most: int) -> list[int]:
        """Continue as most of the positions do, as long as that is likely."""
        drafts: list[int] = []
        likely, most = 1.0, min(most, int(self._factor * length))
        while len(places) and len(drafts) < most:
            known = tokens[np.minimum(places, len(tokens) - 1)]
            ahead = np.array([GAP, *drafts], np.int32)  # after the end of the text itself: the drafts
            nexts = np.where(places < len(tokens), known, ahead[np.maximum(places - len(tokens) + 1, 0)])
            values, counts = np.unique(nexts[nexts != GAP], return_counts=True)
            if not len(values):
                break
            best = int(values[counts.argmax()])
            likely *= counts.max() / len(nexts)
            if likely < self._least:
                break
            drafts.append(best)
            places = places[nexts == best] + 1
        return drafts


MAX_PROMPTS, MAX_ANSWERS = 4096, 4


class SyntheticDrafter:
    def __init__(self, rates: Sequence[float], vocabulary: int) -> None:
        """`rates`: acceptance rate of each draft, if all before it were accepted."""
        self._rates, self._vocabulary = tuple(rates), vocabulary
        self._answers: OrderedDict[tuple[tuple[str, ...], bytes], list[array[int]]] = OrderedDict()

    def propose(self, text: Text, most: int) -> Sequence[int]:
        known, at = self._answers.get(_key(text), ()), len(text.tokens) - text.prompt
        output = text.tokens[text.prompt :]
        drafts: list[int] = []
        for answer in known:
            if answer[:at] == output:
                drafts = answer[at : at + min(most, len(self._rates))].tolist()
                break
        for i, rate in enumerate(self._rates[: len(drafts)]):
            if _chance(len(text.tokens), i) >= rate:
                drafts[i] = (drafts[i] + 1) % self._vocabulary
                break  # drafts after a wrong one are never verified
        return drafts

    def finished(self, text: Text) -> None:
        answers = self._answers.setdefault(key := _key(text), [])
        self._answers.move_to_end(key)
        output = text.tokens[text.prompt :]
        if output not in answers:
            answers.insert(0, output)
            del answers[MAX_ANSWERS:]
        if len(self._answers) > MAX_PROMPTS:
            self._answers.popitem(last=False)


def _key(text: Text) -> tuple[tuple[str, ...], bytes]:
    return text.scope, text.tokens[: text.prompt].tobytes()


def _chance(position: int, draft: int) -> float:
    """Return a fixed pseudorandom number from 0 to 1 for a position and draft."""
    x = (position * 0x9E3779B97F4A7C15 + draft * 0xD1B54A32D192ED03) & 2**64 - 1
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    return float((x ^ x >> 29) >> 11 & 2**40 - 1) / 2**40


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
    if config.method == CUSTOM:
        where = str(config.model)
        return Guarded(where, _load(config, where, lambda: _find(where)), vocabulary)
    plugin = plugin_drafters()[config.method]
    return Guarded(plugin.point.value, _load(config, plugin.point.value, plugin.load), vocabulary)


def _find(where: str) -> Any:
    module, _, name = where.partition(":") if ":" in where else where.rpartition(".")
    if not module or not name:
        raise ConfigError("must be 'package.module:Class'")
    return getattr(importlib.import_module(module), name)


def _load(config: SpeculativeConfig, where: str, find: Callable[[], Any]) -> HostDrafter:
    """Create the user's drafter; its class takes no arguments."""
    try:
        drafter: Any = find()()
        if not callable(getattr(drafter, "propose", None)):
            raise ConfigError("has no method propose(text, most)")
    except Exception as error:
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{NAME}: the drafter {where!r} of method {config.method!r} cannot be used: {why}") from error
    made: HostDrafter = drafter
    return made


class Guarded:
    """A drafter of another package. Its first error is logged and ends speculation; answers are not affected."""

    def __init__(self, name: str, drafter: HostDrafter, vocabulary: int) -> None:
        self._name, self._drafter, self._vocabulary = name, drafter, vocabulary
        self._broken = False

    def propose(self, text: Text, most: int) -> Sequence[int]:
        if self._broken:
            return ()
        try:
            copied = Text(text.tokens[:], text.prompt, text.scope)
            drafts = [int(token) for token in self._drafter.propose(copied, most)][:most]
            if drafts and not 0 <= min(drafts) <= max(drafts) < self._vocabulary:
                raise ValueError(f"it drafted {drafts}, but tokens are from 0 to {self._vocabulary - 1}")
        except Exception:
            logger.exception("the drafter %s failed; speculation stops", self._name)
            self._broken = True
            return ()
        return drafts

    def finished(self, text: Text) -> None:
        finished = getattr(self._drafter, "finished", None)
        if self._broken or finished is None:
            return
        try:
            finished(text._replace(tokens=text.tokens[:]))
        except Exception:
            logger.exception("the drafter %s failed; speculation stops", self._name)
            self._broken = True
