"""Choose the engine of a request among several. Pure: no clock, no randomness; engines are known by number.

    queue    requests that would wait for a slot or for cache pages if the engine got this one, itself included
    work     tokens that an engine still has to run for its open requests: prompts without a first token, less their cached
             part, and the expected rest of every answer
    cost     of a request on an engine: the engine's work plus the tokens of the prompt that the engine has not cached

The engines with the shortest queue are candidates, and the cheapest of them gets the request: cached pages count for the
prefill that they save, never for a wait in a queue while another engine has a free slot. A candidate whose work exceeds the
least by more than `slack` tokens and a `spread` of the least gets nothing, whatever it has cached: another engine then computes
the shared prefix too, and both have it from then on.

Queues and caches are estimates from the requests that engines were given. Cached pages are counted as the engines keep them
(`cache/prefix.py`), and the least recently used are forgotten first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from quire.cache.prefix import extend_keys
from quire.types.request import EngineRequest

EXPECTED_OUTPUT_TOKENS = 128  # of an answer, at every moment until its max_tokens are near: its length is not known
AFFINITY_SLACK_TOKENS, AFFINITY_SPREAD = 2048, 0.25
QUEUE_STEPS_PER_BATCH = 4  # queues that differ by less than this part of an engine's slots count as equally long
MAX_PREFIX_PAGES = 1024  # of a prompt that are looked up: hashing takes time


@dataclass(slots=True, eq=False)
class _Placed:
    """An open request and the tokens that it counts for."""

    engine: int
    length: int  # of its whole prompt
    fresh: int  # of its prompt, not cached when it was placed
    limit: float  # max_tokens
    held: bool  # its pages stay after its end, for forks
    prompt: int = 0  # to be run before its first token
    output: int = 0  # expected after the tokens that came
    generated: int = 0

    @property
    def stored(self) -> int:
        """Cache that it needs for itself."""
        return self.fresh + self.generated + self.output


@dataclass(slots=True)
class _Load:
    """The load of an engine, and what it can run at once: unlimited until it is ready."""

    work: int = 0
    open: int = 0  # requests
    stored: int = 0  # cache tokens that open requests have or will need
    given: int = 0  # tokens, ever: among equals, the engine with the least is next
    slots: float = inf
    capacity: float = inf  # tokens of the cache

    def queue_level(self, tokens: int) -> int:
        """Return how long the queue is if a request of `tokens` joins: 0 if the request can run at once."""
        over_slots = self.open + 1 - self.slots
        over_pages = (self.stored + tokens - self.capacity) / tokens
        waiting = max(over_slots, over_pages)
        step = max(1.0, min(self.slots, self.open) // QUEUE_STEPS_PER_BATCH)
        return ceil(waiting / step) if waiting > 0 else 0


class _Pages:
    """The keys of pages that an engine is assumed to have cached, least recently used first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many of a prompt's first pages are cached."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """Record that a sequence uses its pages; its tail is forgotten before its head."""
        for key in reversed(keys[: self._room]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._room:
            self._keys.popitem(last=False)


class Balancer:
    def __init__(self, engines: int, slack: int = AFFINITY_SLACK_TOKENS, spread: float = AFFINITY_SPREAD) -> None:
        self._slack, self._spread = slack, spread
        self._page_size = 0
        self._pages = [_Pages(0) for _ in range(engines)]
        self._loads = [_Load() for _ in range(engines)]
        self._open: dict[str, _Placed] = {}
        self._held: dict[str, int] = {}  # finished requests that others may fork -> their engine

    @property
    def work(self) -> list[int]:
        """Return the tokens that each engine still has to run."""
        return [load.work for load in self._loads]

    def begin(self, engine: int, pages: int, page_size: int, slots: float = inf, caching: bool = True) -> None:
        """Record that an engine is ready. Its cache is empty, and it runs its open requests again.

        pages: of its cache, `page_size` tokens each; slots: requests that it runs at once; caching: it finds prefixes.
        """
        self._page_size = page_size
        self._pages[engine] = _Pages(pages if caching else 0)
        load = self._loads[engine]
        load.slots, load.capacity = slots, pages * page_size or inf
        for name in [name for name, held in self._held.items() if held == engine]:
            del self._held[name]
        for placed in self._open.values():
            if placed.engine == engine:
                self._weigh(placed, placed.length, placed.output)

    def forget_pages(self) -> None:
        """Forget all cached pages."""
        self._pages = [_Pages(pages._room) for pages in self._pages]

    def place(self, request: EngineRequest, among: Sequence[int]) -> int:
        """Choose one of `among` for a request and count it there. A fork follows its parent if it can."""
        parent = self._engine_of(request.fork_of)
        if parent is not None and parent in among:
            return self._take(request, parent, 0)
        keys = self._keys(request)
        fresh = {engine: self._fresh(request, engine, keys) for engine in among}
        engine = self._cheapest(fresh, _expected(request.params.max_tokens or inf))
        self._pages[engine].use(keys)
        return self._take(request, engine, fresh[engine])

    def move(self, request: EngineRequest, among: Sequence[int]) -> int | None:
        """Place an open request that has not begun on another engine, one of `among`, if one can run it at once."""
        tokens = len(request.prompt) + _expected(request.params.max_tokens or inf)
        free = [engine for engine in among if self._loads[engine].queue_level(tokens) == 0]
        if not free:
            return None
        self.end(request.id)
        return self.place(request, free)

    def engine(self, name: str) -> int | None:
        """Return the engine of an open request."""
        placed = self._open.get(name)
        return None if placed is None else placed.engine

    def add_tokens(self, name: str, tokens: int) -> None:
        """Record that `tokens` more of an answer came."""
        placed = self._open.get(name)
        if placed is not None and tokens:
            self._weigh(placed, 0, _expected(placed.limit - placed.generated - tokens), tokens)

    def end(self, name: str) -> None:
        placed = self._open.pop(name, None)
        if placed is not None:
            load = self._loads[placed.engine]
            load.open -= 1
            load.stored -= placed.stored
            load.work -= placed.prompt + placed.output
            if placed.held:
                self._held[name] = placed.engine

    def release(self, names: Iterable[str]) -> None:
        """Record that no request will fork these any more."""
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
            looked_up = request.prompt[: MAX_PREFIX_PAGES * self._page_size]
            extend_keys(keys, array("i", looked_up), self._page_size, request.salt, request.marks)
        return keys

    def _fresh(self, request: EngineRequest, engine: int, keys: Sequence[bytes]) -> int:
        """Return the prompt tokens that an engine has to run; the last one always has to."""
        length = len(request.prompt)
        if not request.params.reads_prefix_cache:
            return length
        return length - min(self._pages[engine].count(keys) * self._page_size, length - 1)

    def _cheapest(self, fresh: dict[int, int], output: int) -> int:
        loads = self._loads
        queues = {engine: loads[engine].queue_level(tokens + output) for engine, tokens in fresh.items()}
        shortest = min(queues.values())
        candidates = [engine for engine, level in queues.items() if level == shortest]
        least = min(loads[engine].work for engine in candidates)
        bound = least + self._slack + self._spread * least
        allowed = [engine for engine in candidates if loads[engine].work <= bound]
        return min(allowed, key=lambda engine: (loads[engine].work + fresh[engine], loads[engine].given, engine))

    def _take(self, request: EngineRequest, engine: int, prompt: int) -> int:
        limit = request.params.max_tokens or inf
        placed = self._open[request.id] = _Placed(engine, len(request.prompt), prompt, limit, request.hold)
        load = self._loads[engine]
        load.open += 1
        load.stored += placed.stored
        self._weigh(placed, prompt, _expected(limit))
        load.given += prompt + placed.output
        return engine

    def _weigh(self, placed: _Placed, prompt: int, output: int, generated: int = 0) -> None:
        """Count what is left of a request: `prompt` and `output` tokens, after `generated` more."""
        load = self._loads[placed.engine]
        load.work += prompt + output - placed.prompt - placed.output
        load.stored += generated + output - placed.output
        placed.prompt, placed.output = prompt, output
        placed.generated += generated


def _expected(left: float) -> int:
    """Return the expected rest of an answer, if at most `left` tokens may come."""
    return int(max(1, min(EXPECTED_OUTPUT_TOKENS, left)))
