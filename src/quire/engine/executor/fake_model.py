"""The fake executor's "model": the next token is a hash of everything that its attention may see.

For every position each cache group stores one 64-bit cell, a function of the previous cell, the token and the position:

    cell[g][p] = cell[g][p-1] + weight(g, token[p], p) + flavour       (a window of 1 cannot see p-1 and starts at 0)
                 + what images and videos add at p                     (`fake_media`)
    digest[g]  = sum of the cells visible from the last position        (all of them, or the last `window`)
    next token = hash(digests, seed, position)                          (the flavour is of the row's adapter, 0 without one)

So a wrong page, table entry, copy or cursor changes the output, and the tokens of a request depend on nothing else.
All arithmetic is modulo 2**64. `FakeModel.generate` does it one token at a time, without any cache: the oracle of the tests.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from quire.types.cache import CacheLayout
from quire.types.plan import Ints

Words = npt.NDArray[np.uint64]

MASK = 2**64 - 1
TOKEN, POSITION, GROUP, SEED = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 0xABC98388FB8FAC03
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True)
class FakeModel:
    """`eos_probability`: the probability of `eos_id` at every position; it is never sampled otherwise."""

    windows: tuple[int | None, ...]  # [groups] None = sees everything
    vocab_size: int = 1000
    eos_id: int | None = None
    eos_probability: float = 0.0

    @classmethod
    def of(
        cls, layout: CacheLayout, *, vocab_size: int = 1000, eos_id: int | None = None, eos_probability: float = 0.0
    ) -> "FakeModel":
        return cls(tuple(group.window for group in layout.groups), vocab_size, eos_id, eos_probability)

    def weights(self, group: int, tokens: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> Words:
        """Return [n] for tokens and positions [n]."""
        x = tokens.astype(np.uint64) * np.uint64(TOKEN) + positions.astype(np.uint64) * np.uint64(POSITION)
        return mix(x + np.uint64(GROUP * (group + 1) & MASK))

    def sample(self, digests: list[Words], seeds: Words, positions: npt.NDArray[np.integer]) -> Ints:
        """Return tokens [rows] for digests [groups][rows], seeds [rows] and positions [rows] of the new tokens."""
        x = mix(seeds + positions.astype(np.uint64) * np.uint64(SEED))
        for digest in digests:
            x = mix(x ^ digest)
        tokens: Ints = (x % np.uint64(self.vocab_size)).astype(np.int32)
        if self.eos_id is not None:
            tokens = np.where(tokens == self.eos_id, (tokens + 1) % self.vocab_size, tokens)
            tokens = np.where(x >> np.uint64(32) < int(self.eos_probability * 2**32), self.eos_id, tokens).astype(np.int32)
        return tokens

    def generate(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
        adapter: str = "",
        added: Sequence[int] = (0,),
    ) -> list[int]:
        """Return the answer to a prompt by the definition above: up to `max_tokens` tokens, or up to a stop id, which is
        included.

        adapter: version of the adapter that it runs with. added: what is added to the cells, the last value to all further ones
        """
        constant = flavour(adapter) if adapter else 0
        cells: list[list[int]] = [[] for _ in self.windows]
        answer: list[int] = []
        fed, following = 0, list(prompt)
        while len(answer) < max_tokens:
            for token in following:
                for group, window in enumerate(self.windows):
                    before = cells[group][-1] if cells[group] and window != 1 else 0
                    weight = mix_one(token * TOKEN + fed * POSITION + GROUP * (group + 1))
                    cells[group].append(before + weight + constant + int(added[min(fed, len(added) - 1)]) & MASK)
                fed += 1
            x = mix_one(seed + fed * SEED)
            for group, window in enumerate(self.windows):
                x = mix_one(x ^ sum(cells[group] if window is None else cells[group][-window:]) & MASK)
            token = x % self.vocab_size
            if self.eos_id is not None:
                token = (token + 1) % self.vocab_size if token == self.eos_id else token
                token = self.eos_id if x >> 32 < int(self.eos_probability * 2**32) else token
            if len(answer) < min_tokens:
                token = self.without(token, stop_ids)
            following = [token]
            answer.append(token)
            if token in stop_ids and len(answer) > min_tokens:
                break
        return answer

    def within(self, token: int, mask: npt.NDArray[np.uint32]) -> int:
        """Return one of the tokens that a mask [words] allows, as arbitrary as `token`; `token` itself if it allows none."""
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=self.vocab_size, bitorder="little"))
        return int(allowed[token % len(allowed)]) if len(allowed) else token

    def without(self, token: int, stop_ids: Collection[int]) -> int:
        """Return the next token id that is no stop id."""
        return next(
            (t % self.vocab_size for t in range(token, token + self.vocab_size) if t % self.vocab_size not in stop_ids), token
        )


def flavour(version: str) -> int:
    """Return what an adapter adds to every cell. Never 0."""
    return int.from_bytes(sha256(version.encode()).digest()[:8], "little") | 1


def mix(x: Words) -> Words:
    """Mix 64-bit words so that every input bit affects every output bit."""
    for shift, factor in ROUNDS:
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    return x ^ x >> np.uint64(31)


def mix_one(x: int) -> int:
    x &= MASK
    for shift, factor in ROUNDS:
        x = (x ^ x >> shift) * factor & MASK
    return x ^ x >> 31
