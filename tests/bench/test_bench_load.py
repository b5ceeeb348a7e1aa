import asyncio
import selectors
import time

import numpy as np
import pytest

from quire.bench.arrivals import LoadShape, arrival_times
from quire.bench.load import Load, Outgoing
from quire.bench.metrics import Record


def outgoing(dues: object) -> list[Outgoing]:
    return [Outgoing(str(index), b"", float(due)) for index, due in enumerate(dues)]


class Clerk:
    """Takes requests and answers them after a while; knows how many there were at once."""

    def __init__(self, seconds: object = 0.002) -> None:
        self.seconds, self.open, self.peak, self.order = seconds, 0, 0, []

    async def __call__(self, request: Outgoing, record: Record) -> None:
        record.sent = time.perf_counter()
        self.open += 1
        self.peak = max(self.peak, self.open)
        self.order.append(int(request.name))
        await asyncio.sleep(self.seconds(int(request.name)) if callable(self.seconds) else self.seconds)
        self.open -= 1
        record.end = time.perf_counter()


@pytest.mark.parametrize("most", [1, 3, 16])
def test_a_closed_loop_is_full_and_never_fuller(most: int) -> None:
    async def main() -> None:
        rng = np.random.default_rng(0)
        times = rng.uniform(0.0005, 0.004, 200)
        clerk = Clerk(lambda index: times[index])
        load = Load(clerk, most)
        await load.run(outgoing(np.zeros(200)))
        assert clerk.peak == most
        assert len(load.records) == 200
        assert not load.live
        assert clerk.order == list(range(200))
        assert load.duration >= times.sum() / most

    asyncio.run(main())


def test_without_a_bound_all_are_open_at_once() -> None:
    async def main() -> None:
        clerk = Clerk(0.05)
        await Load(clerk).run(outgoing(np.zeros(50)))
        assert clerk.peak == 50

    asyncio.run(main())


class Idleness(selectors.DefaultSelector):
    """Where a loop would wait, its time passes at once; it passes nowhere else."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def test_requests_are_sent_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    idleness = Idleness()
    loop = asyncio.SelectorEventLoop(idleness)
    monkeypatch.setattr(loop, "time", lambda: idleness.now)
    monkeypatch.setattr("time.perf_counter", lambda: idleness.now)
    load = Load(Clerk(0.0))
    dues = arrival_times(LoadShape(request_rate=400), 100, 0)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(load.run(outgoing(dues)))
    assert [record.sent for record in load.records] == pytest.approx(list(dues), abs=1e-6)
    assert load.duration == pytest.approx(dues[-1]) and dues[-1] > 99 / 400 * 0.7


def test_a_bound_makes_later_requests_wait_from_when_they_were_due() -> None:
    async def main() -> Load:
        load = Load(Clerk(0.3), 1)
        await load.run(outgoing([0.0, 0.0, 0.001]))
        return load

    waits = [record.wait for record in asyncio.run(main()).records]
    assert waits[0] >= 0 and waits[1] >= waits[0] + 0.3 and waits[2] >= waits[1] + 0.3 - 0.001


def test_an_interrupted_run_keeps_what_has_ended() -> None:
    async def main() -> Load:
        load = Load(Clerk(lambda index: 0.001 if index < 5 else 30.0))
        running = asyncio.create_task(load.run(outgoing(np.zeros(8))))
        while len(load.records) < 5:
            await asyncio.sleep(0.001)
        running.cancel()
        await running
        return load

    load = asyncio.run(main())
    assert (load.interrupted, len(load.records), len(load.live)) == (True, 5, 0)
    assert load.duration < 25


def test_a_mistake_of_ours_is_not_swallowed() -> None:
    async def broken(_: Outgoing, __: Record) -> None:
        raise KeyError("oops")

    with pytest.raises(ExceptionGroup):
        asyncio.run(Load(broken, 1).run(outgoing([0.0])))
