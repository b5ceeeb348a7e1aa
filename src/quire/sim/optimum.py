"""What an optimal eviction policy would find in the prefix cache: Belady's, which knows the future.

The requests of a replica come one after the other, and each finds the leading pages of its prompt that are cached. When
memory is needed, the page goes that is looked up again farthest in the future, or never. A page that is computed again before
its next lookup, as the last one of a prompt always is, need not be kept until then. The pages of running requests do
not take memory from the cache here, so no policy of the engine reaches more than this, and under load none reaches this.
"""

import heapq
from collections.abc import Iterable, Sequence

from quire.sim.fleet import Run
from quire.sim.trace import Arrival, Trace


def optimal_hit_rate(trace: Trace, run: Run, page_size: int, pages: int) -> float:
    """Return the share of prompt tokens that the optimum finds, with the run's placement of requests on replicas."""
    placed = [(visit.replica, arrival) for visit, arrival in zip(run.visits, trace.arrivals, strict=True) if visit.done]
    found = sum(
        optimal_hits([arrival for replica, arrival in placed if replica == number], page_size, pages)
        for number in range(len(run.replicas))
    )
    return found / max(1, sum(arrival.length for _, arrival in placed))


def optimal_hits(arrivals: Sequence[Arrival], page_size: int, pages: int) -> int:
    """Return the prompt tokens of these requests, in their order, that a cache of `pages` pages can have."""
    ids: dict[object, int] = {}
    # the last token is always computed, and with it its page
    prompts = [_pages(arrival.blocks, page_size, ids)[: (arrival.length - 1) // page_size] for arrival in arrivals]
    texts = [_pages((*arrival.blocks, (arrival.echo, arrival.output)), page_size, ids) for arrival in arrivals]
    following = _uses(prompts, texts)
    cached: dict[int, int] = {}  # page -> the request that looks it up next
    order: list[tuple[int, int]] = []  # a heap of (-next, -page); later pages of a sequence have higher numbers
    hits = 0
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        hits += next((i for i, page in enumerate(prompt) if page not in cached), len(prompt))
        for page in text:
            uses = following[page]
            while uses and uses[-1][0] <= number:
                uses.pop()
            if uses and uses[-1][1]:
                cached[page] = uses[-1][0]
                heapq.heappush(order, (-cached[page], -page))
            else:
                cached.pop(page, None)
        while len(cached) > pages:
            when, page = heapq.heappop(order)
            if cached.get(-page) == -when:
                del cached[-page]
    return hits * page_size


def _uses(prompts: Iterable[Sequence[int]], texts: Iterable[Sequence[int]]) -> dict[int, list[tuple[int, bool]]]:
    """Return the requests that have each page, the last first, and whether they look it up; otherwise they compute it.

    texts: the pages of each prompt that are looked up, and those after them
    """
    found: dict[int, list[tuple[int, bool]]] = {}
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for i, page in enumerate(text):
            found.setdefault(page, []).append((number, i < len(prompt)))
    for uses in found.values():
        uses.reverse()
    return found


def _pages(blocks: Iterable[tuple[int, int]], page_size: int, ids: dict[object, int]) -> list[int]:
    """Return a number for each full page: equal for equal tokens after equal pages."""
    pages, parent, begun, room = list[int](), -1, list[tuple[int, int]](), page_size
    for content, left in blocks:
        while left:
            taken = min(left, room)
            begun.append((content, taken))
            left, room = left - taken, room - taken
            if not room:
                parent = ids.setdefault((parent, *begun), len(ids))
                pages.append(parent)
                begun, room = [], page_size
    return pages
