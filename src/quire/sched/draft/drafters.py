"""Drafters on the host: n-gram, suffix, synthetic, and a class of the user's; `make_drafter` chooses one."""

import importlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.config.speculative import CUSTOM, NAME, NGRAM, SUFFIX, SYNTHETIC, SpeculativeConfig, brought_drafters
from quire.types.errors import ConfigError

Longs = npt.NDArray[np.int64]


class Text(NamedTuple):
    tokens: "array[int]"  # prompt and output; to be read, and not to be kept
    prompt: int  # how many of them are the prompt
    scope: tuple[str, ...]  # whose it is: what was learnt from a text is for texts of the same scope only


class HostDrafter(Protocol):
    def propose(self, text: Text, most: int) -> Sequence[int]:
        """Up to `most` tokens that may come next, likely ones only. Asked whenever the text has grown: it has to be quick."""

    def finished(self, text: Text) -> None:
        """The text is complete, or was given up."""


class BatchDrafter(Protocol):
    """One that takes its time, so it is asked for all texts of a step together, and only where that pays."""

    def propose_all(self, texts: Mapping[str, Text], most: int) -> Mapping[str, Sequence[int]]:
        """Up to `most` tokens that may come next, by the names of the texts. A text only grows."""

    def leave(self, name: str) -> None:
        """The text is complete, or was given up."""

    def idle(self) -> bool:
        """Uses a moment without work. False = there is nothing to prepare."""

    def close(self) -> None:
        """Gives memory back."""


def matches(tokens: npt.NDArray[np.int32], least: int, most: int) -> tuple[Longs, int]:
    """Where the last few tokens stood before: the places behind them, rising, and how many are equal there, from `least` to
    `most`. All places have the longest match that there is; none, and 0, if there is none."""
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
        """`least` to `most` last tokens have to stand there; the more do, the better."""
        self._least, self._most = least, most

    def propose(self, text: Text, most: int) -> Sequence[int]:
        tokens = np.frombuffer(text.tokens, np.int32)  # the array cannot grow as long as this is there
        places, _ = matches(tokens, self._least, self._most)
        if not len(places):
            return ()
        drafts: list[int] = tokens[int(places[-1]) :][:most].tolist()  # as it went on the last time
        return (drafts * most)[:most]  # and where the text ends: over again, for it is in a loop

    def finished(self, text: Text) -> None:
        """Nothing is kept of it."""


MOST_TOKENS = 1 << 18  # kept, of all scopes together: at most some 50 MB with the index
MOST_SCOPES = 1024
MOST_PLACES = 128  # that are looked at
GAP = -1  # between two outputs


class Generation:
    """Outputs end to end, and where each pair of tokens stands."""

    def __init__(self) -> None:
        self.tokens = array("i", [GAP])
        self.latest: dict[int, int] = {}  # pair -> the last place behind one
        self.before = array("i", [0])  # [tokens] place behind a pair -> the one before, 0 = none
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
        """The latest behind these two tokens, falling."""
        place, found = self.latest.get(first << 32 | second, 0), list[int]()
        while place and len(found) < MOST_PLACES:
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
    def __init__(self, depth: int, texts: int, factor: float, least: float, most_tokens: int = MOST_TOKENS) -> None:
        """`depth`: tokens of an end that are compared, and drafts at most. `texts`: outputs of a scope that are kept, or 0.
        `factor`: drafts for each equal token. `least`: how likely a draft is at least, by what is known."""
        self._depth, self._texts, self._factor, self._least, self._most_tokens = depth, texts, factor, least, most_tokens
        self._scopes: OrderedDict[tuple[str, ...], Scope] = OrderedDict()

    def propose(self, text: Text, most: int) -> Sequence[int]:
        most = min(most, self._depth)
        tokens = np.frombuffer(text.tokens, np.int32)  # the array cannot grow as long as this is there
        places, length = matches(tokens, 1, self._depth)
        best = self._walk(tokens, places[-MOST_PLACES:], length, most)
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
        while len(self._scopes) > 1 and (size > self._most_tokens or len(self._scopes) > MOST_SCOPES):
            size -= self._scopes.popitem(last=False)[1].size

    def _find(self, generation: Generation, tokens: npt.NDArray[np.int32]) -> tuple[Longs, int]:
        """The latest places behind the longest end of the text that stands there, and its length."""
        places, length = np.array(generation.places(int(tokens[-2]), int(tokens[-1])), np.int64), 2
        if not len(places):
            return places, 0
        kept = np.frombuffer(generation.tokens, np.int32)
        while length < min(self._depth, len(tokens)):
            longer = places[kept[np.maximum(places - length - 1, 0)] == tokens[-length - 1]]
            if not len(longer):
                break
            places, length = longer, length + 1
        return places, length

    def _walk(self, tokens: npt.NDArray[np.int32], places: Longs, length: int, most: int) -> list[int]:
        """Goes on as most of the places do, as long as that is likely."""
        drafts: list[int] = []
        likely, most = 1.0, min(most, int(self._factor * length))
        while len(places) and len(drafts) < most:
            known = tokens[np.minimum(places, len(tokens) - 1)]
            ahead = np.array([GAP, *drafts], np.int32)  # behind the end of the text itself: what was drafted
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


MOST_PROMPTS, MOST_ANSWERS = 4096, 4


class SyntheticDrafter:
    def __init__(self, rates: Sequence[float], vocabulary: int) -> None:
        """`rates`: of each draft, if all before it were right."""
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
                break  # what comes behind a wrong one is never looked at
        return drafts

    def finished(self, text: Text) -> None:
        answers = self._answers.setdefault(key := _key(text), [])
        self._answers.move_to_end(key)
        output = text.tokens[text.prompt :]
        if output not in answers:
            answers.insert(0, output)
            del answers[MOST_ANSWERS:]
        if len(self._answers) > MOST_PROMPTS:
            self._answers.popitem(last=False)


def _key(text: Text) -> tuple[tuple[str, ...], bytes]:
    return text.scope, text.tokens[: text.prompt].tobytes()


def _chance(position: int, draft: int) -> float:
    """From 0 to 1, the same for the same place."""
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
