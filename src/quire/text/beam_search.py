"""Beam search: which continuations of a prompt go on, as in vLLM. The caller runs the rounds; the engine is not known here.

    search = BeamSearch(...)
    while search.open:
        search.advance(the likeliest next tokens of each of search.beams)
    search.best()

Every beam's continuations compete for the places of the next round; one that ends the text leaves the race complete, however it
ranks. Beams are compared by log-probability per token to the power of length_penalty, prompt included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.types.outputs import TokenLogprobs
from quire.types.sampling import BeamSearchParams


@dataclass(frozen=True, eq=False)
class Beam:
    tokens: tuple[int, ...] = ()  # after the prompt
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    ended: bool = False  # with an end-of-text token, the last of `tokens`
    parent: int = 0  # its place in the round before


class BeamSearch:
    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, eos_ids: Iterable[int], max_model_len: int) -> None:
        self.prompt, self.params = tuple(prompt), params
        self.beams = [Beam()]
        self._complete: list[Beam] = []
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self._rounds = min(params.max_tokens, max_model_len - len(prompt))

    @property
    def open(self) -> bool:
        return bool(self.beams) and self._rounds > 0

    def advance(self, tables: Sequence[TokenLogprobs]) -> None:
        """One table for each of the beams: its 2 * beam_width likeliest continuations."""
        self._rounds -= 1
        grown = [
            Beam((*beam.tokens, token), (*beam.logprobs, table), beam.total + chance.logprob, token in self._eos_ids, place)
            for place, (beam, table) in enumerate(zip(self.beams, tables, strict=True))
            for token, chance in table.items()
        ]
        self._complete = self._first(self._complete + [beam for beam in grown if beam.ended])
        self.beams = self._first([beam for beam in grown if not beam.ended])

    def best(self) -> list[Beam]:
        return self._first(self._complete + self.beams)

    def shown(self, beam: Beam) -> tuple[int, ...]:
        """Its tokens that are text for the user."""
        return beam.tokens[:-1] if beam.ended and not self.params.include_stop_str_in_output else beam.tokens

    def _first(self, beams: Iterable[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, beam: Beam) -> float:
        """An end-of-text token is not counted as length."""
        length = len(self.prompt) + len(beam.tokens) - beam.ended
        return beam.total / float(max(length, 1) ** self.params.length_penalty)
