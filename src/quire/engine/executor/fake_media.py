"""The encoder of the fake executor: its cache of embeddings, checked against every plan, and what embeddings add to cells.

A cell of a token whose embedding comes from an item gets a hash of the item's digest and of the embedding's index; all cells of
an undivided prompt get a hash of the whole prompt.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from quire.engine.executor.fake_model import Words, flavour, mix
from quire.types.errors import EngineError
from quire.types.media import Bidirectional, MediaItem
from quire.types.plan import Admission, StepPlan


def media_flavours(items: Sequence[MediaItem], prompt: Sequence[int], undivided: Bidirectional) -> Words:
    """Return [prompt + 1] what is added to the cells of a prompt, and of all tokens after it."""
    added = np.zeros(len(prompt) + 1, np.uint64)
    for item in items:
        index = 0
        for first, count in item.spans:
            order = np.arange(index, index + count, dtype=np.uint64)
            added[first : first + count] = mix(np.uint64(flavour(item.digest)) + order)
            index += count
    if items and undivided == "prompt":
        whole = sha256(np.array(prompt, np.int32).tobytes() + "".join(item.digest for item in items).encode()).hexdigest()
        added[:-1] += np.uint64(flavour(whole))
    return added


class FakeEncoder:
    def __init__(self, capacity: int, undivided: Bidirectional) -> None:
        """capacity: embeddings that the cache holds. undivided: see `sched/encoding.py`"""
        self._capacity, self._undivided = capacity, undivided
        self.cached: dict[str, int] = {}  # digest -> embeddings
        self.encoded: list[str] = []  # digests, in the order of encoding
        self._items: dict[int, tuple[MediaItem, ...]] = {}  # slot -> its items
        self._added: dict[int, Words] = {}  # slot -> what is added to its cells

    def apply(self, plan: StepPlan, admissions: Mapping[int, Admission]) -> None:
        for slot in plan.retired.tolist():
            self._items.pop(slot, None)
            self._added.pop(slot, None)
        for admission in plan.admitted:
            if items := admission.extras.media:
                self._items[admission.slot] = items
                prompt = admission.tokens[: admission.prompt_length].tolist()
                self._added[admission.slot] = media_flavours(items, prompt, self._undivided)
        for digest in plan.forget:
            self.cached.pop(digest, None)
        for slot, index in plan.encode:
            item = admissions[slot].extras.media[index]
            if item.digest in self.cached:
                raise EngineError(f"{item.digest} was encoded a second time while it was in the cache")
            self.cached[item.digest] = item.embeddings
            self.encoded.append(item.digest)
        if sum(self.cached.values()) > self._capacity:
            raise EngineError(f"the encoder cache has {self.cached}, more than its {self._capacity} embeddings")

    def check(self, slots: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> None:
        """Raise EngineError if a row lacks embeddings, or divides what must not be divided."""
        for slot, begin, end in zip(slots, begins, ends, strict=True) if self._items else ():
            for item in self._items.get(slot, ()):
                spans = [(first, first + count) for first, count in item.spans]
                if any(first < end and begin < last for first, last in spans) and item.digest not in self.cached:
                    raise EngineError(f"a row of slot {slot} needs {item.digest}, which is not in the encoder cache")
                if self._undivided == "prompt":
                    spans = [(0, len(self._added[slot]) - 1)]
                if self._undivided and any(first < end < last for first, last in spans):
                    raise EngineError(f"a row of slot {slot} ends at {end}, inside one of {spans}")

    def add(self, values: Words, slots: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> Words:
        """Return values [n] of these slots and positions [n] with what their embeddings add."""
        for slot in set(slots.tolist()) & set(self._added) if self._added else ():
            own, here = self._added[slot], slots == slot
            values[here] += own[np.minimum(positions[here], len(own) - 1)]
        return values

    def history(self, slot: int, end: int) -> bytes:
        """Return what the state after `end` tokens of a slot depends on besides the tokens."""
        return self._added[slot][:end].tobytes() if slot in self._added else b""
