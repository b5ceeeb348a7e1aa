"""Which rank has which experts, by how much each of them is used. Every rank computes it, from the same numbers."""

from collections.abc import Sequence

NOBODY = -1  # in a place that is free


def spread(loads: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    """loads: of every expert. places: how many experts each rank has room for. -> experts of every rank.

    What is left of the places goes to further copies of those that are used most, and ranks get equally much to do as far as
    that can be: the heaviest first, each to the rank that has the least.
    """
    copies = [1] * len(loads)
    for _ in range(min(sum(places), len(loads) * len(places)) - len(loads)):
        once_more = [expert for expert, count in enumerate(copies) if count < len(places)]
        copies[max(once_more, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    found: list[list[int]] = [[] for _ in places]
    costs = [0.0] * len(places)
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank, experts in enumerate(found) if len(experts) < places[rank]]
            others = [rank for rank in free if expert not in found[rank]] or free
            rank = min(others, key=lambda rank: (costs[rank], rank))
            found[rank].append(expert)
            costs[rank] += loads[expert] / copies[expert]
    return found


def settle(before: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[int]]:
    """The experts of every rank, place by place: whoever stays on a rank stays where it is."""
    settled = []
    for old, new, room in zip(before, wanted, places, strict=True):
        there = [expert if expert in new and expert not in old[:place] else NOBODY for place, expert in enumerate(old)]
        coming = list(new)
        for expert in there:
            if expert != NOBODY:
                coming.remove(expert)
        there = [expert if expert != NOBODY or not coming else coming.pop(0) for expert in there]
        settled.append(there[:room])
    return settled


def balance_of(loads: Sequence[int], ranks: Sequence[Sequence[int]]) -> float:
    """What ranks have to do on average, of what the one has that has most: 1 is even."""
    copies = [max(1, sum(expert in experts for experts in ranks)) for expert in range(len(loads))]
    costs = [sum(loads[expert] / copies[expert] for expert in {*experts} - {NOBODY}) for experts in ranks]
    return sum(costs) / len(costs) / max(costs) if any(costs) else 1.0
