"""From card to card, as far as no card is needed: who records and waits for what, and when."""

import itertools
import socket
import threading

import pytest
import torch

from quire.device.cuda.channel import RECEIVE_BUFFERS, CUDAEnds, CUDAInlet, CUDAOutlet, FromHost, ToHost
from quire.device.cuda.shared_bytes import view_bytes
from quire.dist.channel import Neighbours, Shape
from quire.proc.spawn import anonymous_memory
from thread_ranks import Cards

SHAPE = Shape(slots=3, rows=5, columns=4, dtype=torch.bfloat16)


class Told(Exception):
    pass


class Watch:
    def lost(self, rank):
        raise Told(f"lost {rank}")

    def late(self, ranks, seconds):
        assert seconds < 30


class Circle:
    """Ranks in a ring, each with a card."""

    def __init__(self, size, cards):
        self.cards, memory = cards, anonymous_memory("test", size * SHAPE.size)
        ends = [{} for _ in range(size)]
        for first, second in itertools.combinations(range(size), 2):
            ends[first][second], ends[second][first] = socket.socketpair()
        self.sockets = [end for each in ends for end in each.values()]
        self.ends = [
            CUDAEnds(SHAPE, self._neighbours(rank, size, ends[rank], memory), Watch(), cards[rank]) for rank in range(size)
        ]
        threads = [threading.Thread(target=end.barrier) for end in self.ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for card in cards:
            card.log.clear()

    def _neighbours(self, rank, size, peers, memory):
        return Neighbours(rank, (rank - 1) % size, (rank + 1) % size, peers, {}, memory, lambda sender: sender * SHAPE.size)


@pytest.fixture
def circle():
    made = []

    def make(size, **how):
        made.append(Circle(size, [Cards(**how) for _ in range(size)]))
        return made[-1]

    yield make
    for each in made:
        for end in each.sockets:
            end.close()


@pytest.mark.parametrize("how", [{}, {"reach": False}, {"shares": False}])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_comes(circle, how, size):
    ring = circle(size, **how)
    kinds = (CUDAInlet, CUDAOutlet) if not how else (FromHost, ToHost)
    assert all((type(end.inlet), type(end.outlet)) == kinds for end in ring.ends)
    for turn in range(2 * SHAPE.slots):
        sent = torch.randn(turn % 5 + 1, 4).bfloat16()
        for rank, end in enumerate(ring.ends):
            end.outlet.send(sent + rank)
        for rank, end in enumerate(ring.ends):
            assert torch.equal(end.inlet.receive([0]), sent + (rank - 1) % size)


def test_a_place_is_used_again_when_it_was_read(circle):
    """Numbers are of events, in the order in which a card made them."""
    first, second = (ring := circle(2)).cards
    out, into = ring.ends[0].outlet, ring.ends[1].inlet
    written, read = [event.name for event in out._written], [event.name for event in into._read]
    assert [event.name for event in out._read] == read and [event.name for event in into._written] == written == [0, 1, 2]
    seen = []
    for _ in range(4):
        out.send(torch.ones(2, 4))
        into.receive([0])
        seen.append((list(first.log), list(second.log)))
        first.log.clear()
        second.log.clear()
    used, arrived = [event.name for event in into._used], into._arrived.name
    for turn, (sender, receiver) in enumerate(seen):
        place = turn % SHAPE.slots
        again = [("wait", read[place], "main")] if turn >= SHAPE.slots else []
        assert sender == [*again, ("record", written[place], "main")]
        before = [("record", used[(turn - 1) % RECEIVE_BUFFERS], "main")] if turn else []
        free = [("wait", used[turn % RECEIVE_BUFFERS], "side")] if turn >= RECEIVE_BUFFERS else []
        assert receiver == [
            *before, *free, ("wait", written[place], "side"), ("record", read[place], "side"), ("record", arrived, "side"),
            ("wait", arrived, "main"),
        ]  # fmt: skip


def test_whoever_is_gone_is_copied_inputs(circle):
    ring = circle(2)
    for end in ring.sockets[1:]:
        end.close()
    with pytest.raises(Told, match="lost 1"):
        ring.ends[0].inlet.receive([1])
    with pytest.raises(Told, match="lost 1"):
        ring.ends[0].outlet.send(torch.ones(1, 4))


def test_other_nodes_are_reached_through_the_host():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        ends = [
            CUDAEnds(SHAPE, Neighbours(rank, 1 - rank, 1 - rank, {}, {1 - rank: end}, -1, lambda _: 0), Watch(), Cards())
            for rank, end in enumerate((ours, theirs))
        ]
        for end in ends:
            end.barrier()
        sent = torch.randn(3, 4).bfloat16()
        ends[0].outlet.send(sent)
        assert torch.equal(ends[1].inlet.receive([0]), sent)


def test_memory_that_is_there_is_not_copied():
    memory = torch.arange(16, dtype=torch.uint8)
    view = view_bytes(memory.data_ptr(), 16, torch.device("cpu"))
    view[3] = 99
    assert memory.tolist() == view.tolist() and memory[3] == 99
