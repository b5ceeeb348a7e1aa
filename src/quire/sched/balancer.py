"""Which of several engines a request goes to. Pure: no clock, no chance, and it knows engines by their numbers only.

    work     tokens that an engine still has to run for its open requests: prompts that have not brought a token yet, less what
             was cached of them, and of every answer the tokens that may come, as far as anybody can expect
    cost     of a request there: the engine's work, and what of its prompt the engine has not cached

The cheapest engine gets it: whoever has the prompt's beginning, as long as what is saved outweighs what is waited for. But
nobody gets more whose work exceeds the least by more than `slack` tokens and a `spread` of it, whatever it has cached: a
beginning that many share is then computed once more, elsewhere, and found in both places from then on.

What engines have cached is supposed from what they were given, in pages as they keep them (`cache/prefix.py`), as many as they
have, and the longest unused are forgotten first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.cache.prefix import extend_keys
from quire.types.request import EngineRequest

OUTPUT = 128  # tokens of an answer that are expected: how long it becomes, nobody knows
LEAST = 8  # tokens that an open request counts for, however long it has been answering
SLACK, SPREAD = 2048, 0.25
MOST_PAGES = 1024  # of a prompt that are looked for: keys take time, and whoever has so many has the beginning


@dataclass(slots=True, eq=False)
class _Placed:
    """An open request: tokens that are to be run before its first one, and those that may come then."""

    engine: int
    length: int  # of its whole prompt
    prompt: int
    output: int
    held: bool


class _Pages:
    """What an engine is supposed to have cached: keys of pages, the longest unused first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def count(self, keys: Sequence[bytes]) -> int:
        """Of a prompt's pages, how many from its beginning on are there?"""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """A sequence's tail is forgotten before its head."""
        for key in reversed(keys[: self._room]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._room:
            self._keys.popitem(last=False)


class Balancer:
    def __init__(self, engines: int, slack: int = SLACK, spread: float = SPREAD) -> None:
        self._slack, self._spread = slack, spread
        self._page_size = 0
        self._pages = [_Pages(0) for _ in range(engines)]
        self._open: dict[str, _Placed] = {}
        self._held: dict[str, int] = {}  # finished requests that others may fork -> their engine
        self.work = [0] * engines
        self._given = [0] * engines  # tokens, ever: among equals, whoever had the least is next

    def begin(self, engine: int, pages: int, page_size: int) -> None:
        """An engine is ready, and its cache of so many pages empty. What it had begun is begun again."""
        self._page_size = page_size
        self._pages[engine] = _Pages(pages)
        for name in [name for name, held in self._held.items() if held == engine]:
            del self._held[name]
        for placed in self._open.values():
            if placed.engine == engine:
                self._weigh(placed, placed.length, placed.output)

    def forget_pages(self) -> None:
        """Nothing is cached any more."""
        self._pages = [_Pages(pages._room) for pages in self._pages]

    def place(self, request: EngineRequest, among: Sequence[int]) -> int:
        """The engine that is to have a request, and that has it from now on; one of `among`. Whoever forks another follows
        it, if it can."""
        most = min(OUTPUT, request.params.max_tokens or OUTPUT)
        parent = self._engine_of(request.fork_of)
        if parent is not None and parent in among:
            return self._take(request, parent, 0, most)
        keys = self._keys(request)
        fresh = {engine: self._fresh(request, engine, keys) for engine in among}
        engine = self._cheapest(fresh)
        self._pages[engine].use(keys)
        return self._take(request, engine, fresh[engine], most)

    def engine(self, name: str) -> int | None:
        """Who has an open request."""
        placed = self._open.get(name)
        return None if placed is None else placed.engine

    def told(self, name: str, tokens: int) -> None:
        """So many tokens of an answer came."""
        placed = self._open.get(name)
        if placed is not None and tokens:
            self._weigh(placed, 0, max(min(LEAST, placed.output), placed.output - tokens))

    def end(self, name: str) -> None:
        placed = self._open.pop(name, None)
        if placed is not None:
            self._weigh(placed, 0, 0)
            if placed.held:
                self._held[name] = placed.engine

    def release(self, names: Iterable[str]) -> None:
        """Nobody will fork these any more."""
        for name in names:
            self._held.pop(name, None)

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _engine_of(self, name: str | None) -> int | None:
        if name is None:
            return None
        placed = self._open.get(name)
        return self._held.get(name) if placed is None else placed.engine

    def _keys(self, request: EngineRequest) -> list[bytes]:
        keys: list[bytes] = []
        if self._page_size:
            looked_for = request.prompt[: MOST_PAGES * self._page_size]
            extend_keys(keys, array("i", looked_for), self._page_size, request.salt)
        return keys

    def _fresh(self, request: EngineRequest, engine: int, keys: Sequence[bytes]) -> int:
        """Tokens of the prompt that have to be run there; the last one always has to."""
        length = len(request.prompt)
        if not request.params.reads_prefix_cache:
            return length
        return length - min(self._pages[engine].count(keys) * self._page_size, length - 1)

    def _cheapest(self, fresh: dict[int, int]) -> int:
        least = min(self.work[engine] for engine in fresh)
        bound = least + self._slack + self._spread * least
        allowed = [engine for engine in fresh if self.work[engine] <= bound]
        return min(allowed, key=lambda engine: (self.work[engine] + fresh[engine], self._given[engine], engine))

    def _take(self, request: EngineRequest, engine: int, prompt: int, output: int) -> int:
        placed = self._open[request.id] = _Placed(engine, len(request.prompt), 0, 0, request.hold)
        self._weigh(placed, prompt, output)
        self._given[engine] += prompt + output
        return engine

    def _weigh(self, placed: _Placed, prompt: int, output: int) -> None:
        self.work[placed.engine] += prompt + output - placed.prompt - placed.output
        placed.prompt, placed.output = prompt, output
