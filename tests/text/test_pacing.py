"""JSON in pieces is the JSON that would have been written at once, and paced work takes turns."""

import asyncio
import gc
import json
import time
import weakref

from quire.text.pacing import SLICE_VALUES, TIME_SLICE_S, LazyList, Pace, json_chunks


def test_pieces_are_the_same_json():
    long = 'é\n☃"' * SLICE_VALUES
    value = {"a": [long, {"b": long, "c": None}], "n": list(range(3 * SLICE_VALUES)), "e": [], "few": [1, "x", {"y": 2.5}]}
    lazy = {**value, "lazy": LazyList({"i": i} for i in range(1000)), "none": LazyList(())}
    pieces = asyncio.run(json_chunks(lazy, 1 << 16))
    assert len(pieces) > 5
    assert json.loads(b"".join(pieces)) == {**value, "lazy": [{"i": i} for i in range(1000)], "none": []}
    assert asyncio.run(json_chunks({"a": 1})) == [b'{"a":1}']


def test_paced_work_has_a_turn_in_a_round_of_the_loop():
    """All of them together, not each: the work of one round is little more than a turn."""
    rounds: list[int] = [0]

    async def count_rounds() -> None:
        while True:
            rounds.append(0)
            await asyncio.sleep(0)

    async def work() -> None:
        pace = Pace()
        for _ in range(4):
            await pace()
            rounds[-1] += 1
            end = time.perf_counter() + 1.5 * TIME_SLICE_S
            while time.perf_counter() < end:
                pass

    async def run() -> None:
        counting = asyncio.create_task(count_rounds())
        await asyncio.gather(*[work() for _ in range(5)])
        counting.cancel()

    asyncio.run(run())
    assert sum(rounds) == 20 and max(rounds) <= 2


def test_no_loop_outlives_its_work():
    async def run() -> "weakref.ref[asyncio.AbstractEventLoop]":
        await json_chunks(LazyList(range(10)))
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(run())
    gc.collect()
    assert loop() is None
