"""Encoding of images and videos: what a step encodes, and what the encoder cache holds (vLLM's `EncoderCacheManager`).

The device keeps the embeddings of items by digest. `StepPlan.encode` and `StepPlan.forget` are the only changes of that cache,
so this mirror of it decides: the least recently used item goes first, and none that a row of the step or a running request
still needs.

    prompt    text  [ item A ...... ]  text  [ item B ... ]  text
    computed  -------------> inside A: A stays until the position after its last embedding is computed

A request holds at most the item that it is inside of, and a row that reaches the end of an item releases it with the step.
So a request that waits for space holds none, and those that hold some never wait for it. While a request waits for space, no
later one begins an item in the same step.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from quire.sched.plan_builder import PlanBuilder
from quire.types.errors import EngineError, PromptTooLong, RequestError
from quire.types.media import Bidirectional, MediaItem
from quire.types.request import EngineRequest, Request, Spans
from quire.types.stats import EncoderCounts


class Encoding:
    def __init__(
        self, capacity: int = 0, step: int = 0, undivided: Bidirectional = "", *, max_tokens: int = 0, chunked: bool = True
    ) -> None:
        """Create the mirror of an empty encoder cache.

        capacity: embeddings that the cache holds; 0: the model reads no media
        step: embeddings that one step encodes; a single item may have more
        undivided: what one row has to cover: "item", each range of embeddings; "prompt", a prompt with media; "", nothing
        max_tokens: of a step
        chunked: prompts may be divided among steps
        """
        self.undivided = undivided
        self._capacity, self._step, self._max_tokens, self._chunked = capacity, step, max_tokens, chunked
        self._cached: OrderedDict[str, int] = OrderedDict()  # digest -> embeddings, least recently used first
        self._stored = 0  # embeddings in it
        self._stale: list[str] = []  # digests that the device may have, but should not
        self._inside: dict[Request, MediaItem] = {}
        self._queries = self._hits = self._embeddings = 0
        # of the current step:
        self._used: set[str] = set()
        self._reserved = False  # a request waits for space
        self.encoded = 0  # embeddings

    @property
    def counts(self) -> EncoderCounts:
        return EncoderCounts(self._queries, self._hits, self._embeddings)

    def admit(self, spec: EngineRequest) -> Spans:
        """Return the ranges of positions that one row has to cover. Raise RequestError if the request can never run."""
        items = spec.extras.media
        if not self._capacity:
            raise RequestError("the prompt has images or videos, which this engine does not read. Remove them", "prompt")
        for item in items:
            if item.embeddings > self._capacity:
                raise self._too_large(f"the {item.modality} at position {item.start}", item.embeddings)
        whole = sum({item.digest: item.embeddings for item in items}.values())
        if whole > self._capacity and (self.undivided == "prompt" or not self._chunked):
            raise self._too_large("the prompt, which is computed in one step,", whole)
        spans: Spans = ()
        if self.undivided == "prompt":
            spans = ((0, len(spec.prompt)),)
        elif self.undivided == "item":
            spans = tuple((first, first + count) for item in items for first, count in item.spans)
        longest = max((end - first for first, end in spans), default=0)
        if longest > self._max_tokens:
            what, also = ("a prompt with images", ", or shorten the prompt") if self.undivided == "prompt" else ("an image", "")
            raise PromptTooLong(
                f"{what} must be computed in one step by this model; it has {longest} tokens, and a step has at most "
                f"{self._max_tokens}. Raise max_num_batched_tokens{also}",
                "prompt",
            )
        return spans

    def _too_large(self, what: str, embeddings: int) -> RequestError:
        return RequestError(
            f"{what} has {embeddings} embeddings, and the encoder cache holds {self._capacity}. Use fewer or smaller images or "
            "shorter videos, or raise mm_encoder_cache_size",
            "prompt",
        )

    # ---- planning --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""
        self._used.clear()
        self._reserved, self.encoded = False, 0
        if self._inside:
            self._inside = {request: item for request, item in self._inside.items() if _is_inside(request, item)}

    def row_length(self, request: Request, count: int, left: int, most: int, first_prompt: bool) -> int:
        """Return the tokens of the request's next row; 0: no row.

        count: tokens that other limits allow; a range that must not be divided may have more
        left: budget of the step; an encoded embedding costs as much as a token
        most: tokens that the step has space for
        first_prompt: all earlier rows of the step are decode rows, so an item larger than the budget may be encoded now
        """
        start = request.computed
        least = request.reach(start) if self._chunked else start + count  # the end of the shortest possible row
        if least - start > most:
            return 0
        limit = stop = max(start + count, least)
        cost, row = 0, set[str]()
        for _, item, first in _reached(request, start, limit):  # add each item, or end the row before the first that cannot be
            if first >= stop:
                break
            size = 0 if item.digest in self._cached or item.digest in row else item.embeddings
            end = min(limit, start + left - cost - size)  # of a row whose budget also covers encoding the item
            affordable = end >= max(least, request.reach(first)) and self.encoded + cost + size <= self._step
            alone = first < least and first_prompt and not self.encoded
            space = self._space({*row, item.digest}) - cost >= size
            may_begin = not self._reserved or (self._inside.get(request) is item and _is_inside(request, item))
            if not (may_begin and space and (not size or affordable or alone)):
                self._reserved |= first < least and not space
                stop = start if first < least else first
                break
            row.add(item.digest)
            if size:
                stop, cost = max(least, end), cost + size
        return max(stop if stop <= least else request.before_span(stop), start) - start

    def place(self, request: Request, start: int, plan: PlanBuilder) -> int:
        """Plan what a row from `start` to `computed` needs; return its cost in tokens of the step's budget."""
        reached = list(_reached(request, start, request.computed))
        self._used.update(item.digest for _, item, _ in reached)
        plan.forget(self._stale)
        self._stale, before = [], self.encoded
        for index, item, _ in reached:
            cached = item.digest in self._cached
            begun = self._inside.get(request) is item and item.first < start
            self._queries += not (begun and cached)
            self._hits += cached and not begun
            if not cached:
                self._make_space(item.embeddings, plan)
                plan.encode(request.slot, index, item.embeddings)
                self._cached[item.digest] = item.embeddings
                self._stored += item.embeddings
                self.encoded += item.embeddings
            self._cached.move_to_end(item.digest)
        if reached:
            self._inside[request] = reached[-1][1]
        self._embeddings += self.encoded - before
        return self.encoded - before

    def _space(self, row: Iterable[str]) -> int:
        """Return the embeddings that the cache can take, if what a row uses stays."""
        return self._capacity - sum(self._cached.get(digest, 0) for digest in self._needed.union(row))

    @property
    def _needed(self) -> set[str]:
        """Return the digests that rows of the step or running requests need."""
        return self._used | {item.digest for request, item in self._inside.items() if _is_inside(request, item)}

    def _make_space(self, size: int, plan: PlanBuilder) -> None:
        needed = self._needed
        for digest in [digest for digest in self._cached if digest not in needed]:
            if self._stored + size <= self._capacity:
                return
            self._stored -= self._cached.pop(digest)
            plan.forget([digest])
        if self._stored + size > self._capacity:
            raise EngineError(f"an item of {size} embeddings does not fit the encoder cache, which has {self._stored}")

    # ---- loss ------------------------------------------------------------------------------------------------------------

    def forget(self, items: Iterable[MediaItem]) -> None:
        """Forget items whose embeddings may be missing or wrong."""
        for item in items:
            if item.digest in self._cached:
                self._stored -= self._cached.pop(item.digest)
                self._stale.append(item.digest)

    def forget_all(self, also: Iterable[str] = ()) -> None:
        """Forget all items. also: digests that the device was to forget in a step that was lost."""
        self._stale += [*also, *self._cached]
        self._cached.clear()
        self._stored = 0

    def check(self) -> None:
        """Raise EngineError if the counts are inconsistent. For tests and idle times."""
        if self._stored != sum(self._cached.values()) or self._stored > self._capacity:
            raise EngineError(f"the encoder cache has {self._cached} and counts {self._stored} of {self._capacity}")


def _reached(request: Request, start: int, end: int) -> Iterator[tuple[int, MediaItem, int]]:
    """Yield the items with an embedding in a row from `start` to `end`: index, item and the first such position."""
    for index, item in enumerate(request.spec.extras.media):
        if item.last > start and item.first < end and (first := item.next_embedded(start)) < end:
            yield index, item, first


def _is_inside(request: Request, item: MediaItem) -> bool:
    """Return whether the request is in a slot, and between the first and the last embedding of the item."""
    return request.slot >= 0 and item.first < request.computed < item.last
