"""Nodes that meet, and strangers who say to be one of them."""

import contextlib
import select
import socket
import threading
import time

import pytest

from patience import PATIENCE
from quire.engine.executor import nodes
from quire.engine.handshake import connect, listen, receive_json, send_json

TERMS = {"version": "1", "files": {}, "arguments": {}, "model": "somewhere"}  # that all nodes agree on


class Meeting:
    """Node 0 and two others, each with a rank. Node 1 has come first: whoever claims its place came later, and is tried before
    it if it can be tried at all."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack, self.made = stack, dict[int, nodes.Links]()
        self._listener = stack.enter_context(listen(("127.0.0.1", 0)))
        self._first = self._listener.getsockname()
        self._threads = [self._start(1)]
        assert select.select([self._listener], [], [], PATIENCE)[0], "it stands first in the line"

    def _start(self, node: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: self.made.update({node: nodes.join(self._first, node, "127.0.0.1", "", PATIENCE, TERMS)})
        )
        thread.start()
        return thread

    def connect(self, said: dict) -> socket.socket:
        stranger = self._stack.enter_context(connect(self._first, time.monotonic() + PATIENCE))
        send_json(stranger, {"key": "", **said})
        return stranger

    def claim(self) -> socket.socket:
        return self.connect({"node": 1, "host": "127.0.0.1", "port": 1, **TERMS})

    def begin(self) -> threading.Thread:
        gathering = threading.Thread(
            target=lambda: self.made.update({0: nodes.gather(self._listener, nodes.share_ranks(3, 3), "", PATIENCE, TERMS)})
        )
        gathering.start()
        return gathering

    def finish(self, gathering: threading.Thread) -> None:
        self._threads.append(self._start(2))
        for thread in (gathering, *self._threads):
            thread.join(PATIENCE)
        assert {node: sorted(links.controls) for node, links in self.made.items()} == {0: [1, 2], 1: [1], 2: [2]}
        assert {node: {rank: sorted(ends) for rank, ends in links.ends.items()} for node, links in self.made.items()} == {
            0: {0: [1, 2]}, 1: {1: [0, 2]}, 2: {2: [0, 1]}
        }  # fmt: skip
        for links in self.made.values():
            links.close()


@pytest.fixture
def meeting():
    with contextlib.ExitStack() as stack:
        yield Meeting(stack)


def test_those_who_only_claim_a_place_keep_nobody_waiting(meeting, monkeypatch):
    """Not even once, however many there are: nobody is tried in vain."""
    monkeypatch.setattr(nodes, "PEER_CONNECT_TIMEOUT_S", 10 * PATIENCE)
    strangers = [meeting.claim() for _ in range(20)]
    meeting.connect({"claim": "none", "control": 1})
    meeting.connect({"control": 1})
    meeting.finish(meeting.begin())
    assert "own" in receive_json(strangers[-1], PATIENCE)
    assert receive_json(strangers[-1], PATIENCE) == {"refused": "node_rank 1 has joined already"}


def test_those_who_connect_to_node_0_and_to_nobody_else_cost_a_moment_each(meeting, monkeypatch):
    monkeypatch.setattr(nodes, "PEER_CONNECT_TIMEOUT_S", 0.3)
    gathering = meeting.begin()
    for _ in range(2):
        stranger = meeting.claim()
        asked = receive_json(stranger, PATIENCE)
        assert asked["own"] == [1, 2]
        meeting.connect({"claim": asked["claim"], "control": 1})
    meeting.finish(gathering)
