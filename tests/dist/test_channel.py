"""Hidden states from one process to the next, here within one."""

import os
import socket

import pytest
import torch
from test_shared_memory import Told, Watch

from quire.dist import channel
from quire.dist.channel import Inlet, Outlet, Shape
from quire.proc.spawn import anonymous_memory

SHAPE = Shape(slots=3, rows=5, columns=4, dtype=torch.bfloat16)


@pytest.fixture
def ends():
    memory, (ours, theirs) = anonymous_memory("test"), socket.socketpair()
    os.ftruncate(memory, 2 * SHAPE.size)
    yield Outlet(SHAPE, memory, SHAPE.size, 1, ours, Watch()), Inlet(SHAPE, memory, SHAPE.size, 0, theirs, Watch()), theirs
    os.close(memory)
    ours.close()
    theirs.close()


def test_places_are_used_in_turn(ends):
    outlet, inlet, _ = ends
    sent = [torch.randn(rows, 4, dtype=torch.bfloat16) for rows in (5, 1, 3, 2, 5)]
    for each in sent[:3]:
        outlet.send(each)
    first = inlet.receive([0])
    for each in sent[3:]:  # as many as are in flight at most
        assert torch.equal(first, sent[0])
        sent.append(sent.pop(0))
        first = inlet.receive([0])
        outlet.send(each)
    assert [len(inlet.receive([0])) for _ in range(2)] == [2, 5]


def test_whoever_is_late_or_gone_is_told(ends, monkeypatch):
    outlet, inlet, theirs = ends
    monkeypatch.setattr(channel, "POLL_S", 0.01)
    with pytest.raises(Told, match=r"late \[0, 2\]"):
        inlet.receive([0, 2])
    theirs.close()
    with pytest.raises(Told, match="lost 1"):
        outlet.send(torch.zeros(1, 4))
