from array import array

from quire.sched.queue import Order, Queue, Running
from quire.types.request import EngineRequest, Request
from quire.types.sampling import SamplingParams


def make(order: int, priority: int = 0) -> Request:
    spec = EngineRequest(str(order), (1,), SamplingParams(), 0, frozenset(), frozenset(), 0.0, priority=priority)
    return Request(spec, limit=9, order=order, tokens=array("i", [1]))


def drain(queue: Queue) -> list[int]:
    out = []
    while (request := queue.peek()) is not None:
        queue.remove(request)
        out.append(request.order)
    return out


def test_order_by_policy():
    requests = [make(0, 2), make(1, 0), make(2, 1), make(3, 0)]
    for policy, expected in (("fcfs", [0, 1, 2, 3]), ("priority", [1, 3, 2, 0])):
        queue = Queue(Order(policy), Running(Order(policy)))
        for request in reversed(requests):
            queue.push(request)
        assert drain(queue) == expected


def test_leaving_from_the_middle_and_coming_back():
    queue = Queue(Order("fcfs"), Running(Order("fcfs")))
    requests = [make(i) for i in range(4)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    queue.remove(requests[2])
    assert requests[2] not in queue
    assert len(queue) == 2
    queue.push(requests[0])
    assert drain(queue) == [0, 1, 3]
    assert len(queue) == 0


def test_the_last_running_is_the_worst():
    running = Running(Order("priority"))
    requests = [make(0, 1), make(1, 0), make(2, 1)]
    for request in requests:
        running.add(request)
    assert [request.order for request in running] == [1, 0, 2]
    running.remove(requests[0])
    assert running[-1] is requests[2]


def test_only_a_strictly_better_priority_outranks():
    assert Order("priority").outranks(make(5, 0), make(1, 1))
    assert not Order("priority").outranks(make(0, 1), make(1, 1))
    assert not Order("fcfs").outranks(make(5, 0), make(1, 1))
