"""Nodes that meet, and strangers who say to be one of them."""

import contextlib
import select
import threading
import time

from patience import PATIENCE
from quire.engine.executor import nodes
from quire.engine.handshake import connect, listen, say


def test_those_who_only_claim_a_place_cost_a_moment_each(monkeypatch):
    """They came later than the node whose place they claim, so they are tried before it."""
    monkeypatch.setattr(nodes, "ENDS", 0.3)
    made: dict[int, nodes.Links] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(("127.0.0.1", 0)))
        first = listener.getsockname()

        def start(node: int) -> threading.Thread:
            thread = threading.Thread(target=lambda: made.update({node: nodes.join(first, node, "127.0.0.1", "", PATIENCE)}))
            thread.start()
            return thread

        begun = [start(1)]
        assert select.select([listener], [], [], PATIENCE)[0], "it stands first in the line"
        for _ in range(3):
            stranger = stack.enter_context(connect(first, time.monotonic() + PATIENCE))
            say(stranger, {"key": "", "node": 1, "host": "127.0.0.1", "port": 1})
        begun.append(start(2))
        made[0] = nodes.gather(listener, nodes.share_ranks(3, 3), "", PATIENCE)
        for thread in begun:
            thread.join(PATIENCE)
        assert {node: sorted(links.controls) for node, links in made.items()} == {0: [1, 2], 1: [1], 2: [2]}
        assert {node: {rank: sorted(ends) for rank, ends in links.ends.items()} for node, links in made.items()} == {
            0: {0: [1, 2]}, 1: {1: [0, 2]}, 2: {2: [0, 1]}
        }  # fmt: skip
        for links in made.values():
            links.close()
