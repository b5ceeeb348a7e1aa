"""Ranks of several nodes add and join as ranks of one do; nodes that do not belong together are refused."""

import contextlib
import itertools
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from patience import PATIENCE
from quire.device.cuda.nodes_group import HostNodesGroup
from quire.dist import shared_memory
from quire.dist.mesh import Position, evenly
from quire.dist.shared_memory import NodesGroup
from quire.engine.executor import nodes
from quire.engine.handshake import address_towards, listen, receive_json, send_json
from quire.proc.spawn import anonymous_memory
from quire.types.errors import EngineError

TERMS = {"version": "1", "files": {}, "arguments": {}, "model": "somewhere"}


class Patient:
    def lost(self, rank):
        raise AssertionError(f"rank {rank} is gone")

    def late(self, ranks, seconds):
        pass


@contextlib.contextmanager
def groups(places, kind=NodesGroup):
    """places: of every rank, its node."""
    size = len(places)
    local, remote = [{} for _ in places], [{} for _ in places]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for one, other in itertools.combinations(range(size), 2):
            if places[one] == places[other]:
                local[one][other], local[other][one] = socket.socketpair()
            else:
                remote[one][other] = socket.create_connection(server.getsockname())
                remote[other][one] = server.accept()[0]
    memories = {node: anonymous_memory("test") for node in set(places)}
    try:
        yield [
            kind(Position(rank, size), memories[node], local[rank], Patient(), remote[rank]) for rank, node in enumerate(places)
        ]
    finally:
        for end in itertools.chain.from_iterable(ends.values() for ends in (*local, *remote)):
            end.close()
        for memory in memories.values():
            os.close(memory)


def together(made, work):
    results = [None] * len(made)

    def run(rank):
        results[rank] = work(made[rank], rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(
    ("places", "kind"), [((0, 1), NodesGroup), ((0, 0, 1), NodesGroup), ((0, 1, 1, 2), NodesGroup), ((0, 0, 1), HostNodesGroup)]
)
def test_sums_and_joins(monkeypatch, places, kind):
    monkeypatch.setattr(shared_memory, "CHUNK_BYTES", 1 << 16)  # several pieces, and more than the connections hold at once
    size = len(places)
    shares = [evenly(65)(Position(rank, size)) for rank in range(size)]
    with groups(places, kind) as made:
        for rows, kind in ((1, torch.float32), (700, torch.float32), (700, torch.bfloat16), (0, torch.float32)):
            parts = [torch.randn(rows, 65, generator=torch.Generator().manual_seed(rank)).to(kind) for rank in range(size)]
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            added = together(made, lambda group, rank, parts=parts: group.add(parts[rank]))
            assert all(torch.equal(one, expected) for one in added)
            whole = parts[0]
            joined = together(made, lambda group, rank, whole=whole: group.join(whole[:, list(shares[rank])].contiguous(), 65))
            assert all(torch.equal(one, whole) for one in joined)


def test_who_is_let_in():
    with listen(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        refused, joined = [], []

        def come(node, key):
            try:
                joined.append(nodes.join(address, node, "127.0.0.1", key, PATIENCE, TERMS))
            except EngineError as error:
                refused.append(str(error))

        def intrude():
            with socket.create_connection(address) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            for said in ({"node": 1}, {"node": 1, "host": [], "port": 1}, {"node": [1], "host": "", "port": 1}):
                with socket.create_connection(address) as stranger:
                    send_json(stranger, {"key": "right", **said})

        def intrude_among_ranks():
            for said in ({"control": [1]}, {"control": "1"}, {"from": [1], "to": {}}, {"control": 7}):
                with socket.create_connection(address) as stranger:
                    send_json(stranger, {"key": "right", **said})

        def visit():
            intrude()
            come(1, "other")
            come(7, "right")
            with ThreadPoolExecutor(1) as other:  # node 1's connections come behind theirs, or between
                joining = other.submit(come, 1, "right")
                intrude_among_ranks()
                joining.result()

        visitor = threading.Thread(target=visit)
        visitor.start()
        links = nodes.gather(listener, nodes.share_ranks(3, 2), "right", PATIENCE, TERMS)
        visitor.join()
        assert links.own == range(1) and sorted(links.controls) == [1, 2] and sorted(links.ends[0]) == [1, 2]
        for one in (links, *joined):
            one.close()
    assert "the key (QUIRE_CLUSTER_KEY) differs" in refused[0] and "node_rank 7 is not one of 1 to 1" in refused[1]


def test_a_node_that_does_not_come_is_named_with_its_ranks():
    with listen(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        absent = (
            r"^node 1 \(ranks 1 to 2\) did not connect; node 2 \(ranks 3 to 4\) did not connect within 0.05 s. Start the same "
            rf"command .* its node_rank and --headless, and check that it can reach 127.0.0.1, port {port}$"
        )
        with pytest.raises(EngineError, match=absent):
            nodes.gather(listener, nodes.share_ranks(5, 3), "", 0.05, TERMS)
    with pytest.raises(EngineError, match=r"cannot be reached: .*. Start machine 0, and give its master_addr and master_port"):
        nodes.join(("127.0.0.1", port), 1, "127.0.0.1", "", 0.05, TERMS)


def test_a_port_in_use_is_named_with_its_argument():
    names = ("master_addr", "master_port")
    with listen(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port}, .*: Address already in use. End .* or choose another master_port"):
            listen(("127.0.0.1", port), names)
    with pytest.raises(EngineError, match="master_addr must be an address of this machine"):
        listen(("192.0.2.1", port), names)


def test_a_node_that_differs_is_refused_and_named_when_time_is_over():
    differs = "its dtype is 'half', machine 0's is 'auto'; remove it on that machine"
    with listen(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        send_json(other, {"key": "", "node": 1, "host": "127.0.0.1", "port": 1, **TERMS, "arguments": {"dtype": "half"}})
        with pytest.raises(EngineError, match=rf"node 1 \(rank 1\) was refused: {differs}"):
            nodes.gather(listener, nodes.share_ranks(2, 2), "", 1.0, {**TERMS, "arguments": {"dtype": "auto"}})
        assert receive_json(other, PATIENCE) == {"refused": differs}


RESET = struct.pack("ii", 1, 0)  # lingers for no time: closing is a reset
AS_ONE = {"key": "", "host": "127.0.0.1", "port": 1, **TERMS}


def strangers(address, *hellos, reset=False):
    for said in hellos:
        stranger = socket.create_connection(address)
        if said is not None:
            send_json(stranger, said)
        if reset:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            stranger.close()
        yield stranger


@pytest.mark.parametrize(
    ("hellos", "reset"),
    [
        ([{**AS_ONE, "node": 99}] * 20, True),  # there is nobody to refuse
        ([{**AS_ONE, "node": 1}] * 3, True),  # nobody to be told
        ([None] * 100, False),
        ([{**AS_ONE, "node": 1}] * 5, False),  # one has a place, and connects no ranks
    ],
)
def test_strangers_do_not_keep_nodes_from_meeting(monkeypatch, hellos, reset):
    monkeypatch.setattr(nodes, "PEER_CONNECT_TIMEOUT_S", 1.0)
    with listen(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as others:
        address = listener.getsockname()
        first = others.submit(nodes.gather, listener, nodes.share_ranks(3, 3), "", 30.0, TERMS)
        there = list(strangers(address, *hellos, reset=reset))
        joined = [others.submit(nodes.join, address, node, "127.0.0.1", "", PATIENCE, TERMS) for node in (2, 1)]
        links = [first.result(), *(one.result() for one in joined)]
        assert sorted(links[0].controls) == [1, 2] and sorted(links[0].ends[0]) == [1, 2]
        pairs = [(links[0].controls[1], links[2].controls[1]), (links[1].ends[2][1], links[2].ends[1][2])]
        for number, (one, other) in enumerate(pairs):
            send_json(one, {"number": number})
            assert receive_json(other, PATIENCE) == {"number": number}, "both are of the same meeting"
        for one in (*links, *there):
            one.close()


def test_a_place_is_free_again_when_no_ranks_come(monkeypatch):
    monkeypatch.setattr(nodes, "PEER_CONNECT_TIMEOUT_S", 1.0)
    with listen(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        address = listener.getsockname()
        first = other.submit(nodes.gather, listener, nodes.share_ranks(2, 2), "", PATIENCE, TERMS)
        [stranger] = strangers(address, {**AS_ONE, "node": 1})
        claim = receive_json(stranger, PATIENCE)["claim"]
        with socket.create_connection(address) as control, socket.create_connection(address) as late:
            send_json(control, {"key": "", "claim": claim, "control": 1})
            told = receive_json(stranger, PATIENCE)
            send_json(late, {"key": "", "meeting": "", "control": 1})  # of a meeting before
            joined = nodes.join(address, 1, "127.0.0.1", "", PATIENCE, TERMS)
        links = first.result()
        assert links.meeting == joined.meeting != told["meeting"] and sorted(links.controls) == [1]
        for one in (links, joined, stranger):
            one.close()


def test_an_address_of_machine_0_that_does_not_resolve(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(EngineError, match="machine 0's address 'head' cannot be used from this machine: Name or .* Give an address"):
        address_towards(("head", 29501))
