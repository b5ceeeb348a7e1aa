"""Mailboxes: whole messages in order, however large they are, and nobody waits to send."""

import socket
import threading
import time

import pytest

from patience import PATIENCE
from quire.engine import ipc
from quire.engine.process import Link
from quire.proc.channel import Channel


@pytest.fixture
def ends():
    pair = [Channel(end) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def received(end: Channel, count: int) -> list[bytes]:
    messages: list[bytes] = []
    deadline = time.monotonic() + PATIENCE
    while len(messages) < count and time.monotonic() < deadline:
        if (message := end.receive()) is not None:
            messages.append(message)
        else:
            end.wait(100)
    return messages


def test_messages_come_whole_and_in_order(ends):
    here, there = ends
    sent = [b"", b"a", b"b" * 100_000, b"c"]
    for message in sent:
        here.send(message)
    assert received(there, len(sent)) == sent
    assert there.receive() is None and not there.wait(0) and not there.closed


def test_nobody_waits_for_a_reader_and_nothing_is_lost(ends):
    here, there = ends
    sent = [b"%d" % number * 1000 for number in range(5000)]
    for message in sent:
        here.send(message)
    assert here.full
    reader: list[bytes] = []
    thread = threading.Thread(target=lambda: reader.extend(received(there, len(sent))))
    thread.start()
    here.drain(10)
    thread.join()
    assert reader == sent and not here.full


def test_what_is_kept_leaves_while_its_sender_waits_for_something_else(ends):
    here, there = ends
    here.send(b"x" * 10_000_000)

    def answer() -> None:
        [message] = received(there, 1)
        there.send(b"%d" % len(message))

    thread = threading.Thread(target=answer)
    thread.start()
    assert here.wait(int(1000 * PATIENCE)) and here.receive() == b"10000000"
    thread.join()


def test_two_threads_may_send(ends):
    here, there = ends

    def send(letter: bytes) -> None:
        for _ in range(300):
            here.send(letter * 5000)

    threads = [threading.Thread(target=send, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    messages: list[bytes] = []
    while len(messages) < 600:
        here.flush()
        messages += received(there, 1)
    for thread in threads:
        thread.join()
    assert sorted(messages) == [b"a" * 5000] * 300 + [b"b" * 5000] * 300


def test_the_other_end_is_closed(ends):
    here, there = ends
    here.send(b"last")
    here.close()
    assert received(there, 1) == [b"last"]
    assert there.wait(int(1000 * PATIENCE)) and there.receive() is None and there.closed
    began = time.monotonic()
    assert not there.wait(50) and time.monotonic() - began >= 0.05, "a closed end is not waited for in a busy loop"
    there.send(b"to nobody" * 100_000)
    assert not there.full


def test_a_large_report_leaves_before_the_next_step():
    """The other end reads only while somebody waits for it: what found no room must not wait for the next message."""
    ours, theirs = socket.socketpair()
    there = Channel(theirs)

    class Waiting(Channel):
        def drain(self, seconds: float) -> None:
            assert 0 < seconds < 0.1, "nor may a step wait long for a slow reader"
            while self.full:
                assert there.receive() is None  # takes in what is there, which is not all
                self.flush()

    here = Waiting(ours)
    Link(here).send(ipc.Failed("EngineError", "x" * 3_000_000))
    assert not here.full and len(received(there, 1)) == 1
    here.close()
    there.close()
