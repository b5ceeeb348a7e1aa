"""Ranks that are threads of this process instead of processes: whatever a test puts in the place of a device's own ways, all of
them have. `Cards` plays CUDA, as far as hidden states are handed on by it."""

import contextlib
import itertools
import queue
import secrets
import socket
import threading

import msgspec
import torch

from patience import PATIENCE
from quire.engine.executor import wire
from quire.engine.executor.worker import Rank
from quire.proc.spawn import anonymous_memory
from quire.types.errors import EngineDead


class ThreadWorkers:
    """In the place of `Workers`."""

    def __init__(self, start, size, timeouts, links=None, expert_peers=None):
        self.memory, self.remote, self.count, self.gone = anonymous_memory("threads"), {}, size - 1, False
        ends = [{} for _ in range(size)]
        for first, second in itertools.combinations(range(size), 2):
            ends[first][second], ends[second][first] = socket.socketpair()
        self.peers, self._ends = ends[0], ends
        self.ranks = [Rank(self.memory, peers, {}) for peers in ends]  # the first is not used
        self._asked = [queue.SimpleQueue() for _ in range(size)]
        self._told = [queue.SimpleQueue() for _ in range(size)]
        self._threads = [threading.Thread(target=self._run, args=(rank, ends[rank])) for rank in range(1, size)]
        for rank, thread in enumerate(self._threads, 1):
            self._asked[rank].put(wire.encode(msgspec.structs.replace(start, rank=rank)))
            thread.start()

    def _run(self, number, peers):
        rank = self.ranks[number]
        while (frame := self._asked[number].get()) is not None:
            try:
                report = rank.execute(wire.decode_command(frame))
            except Exception as error:  # told to whoever waits
                self._told[number].put(error)
                for peer in peers.values():
                    peer.shutdown(socket.SHUT_RDWR)
                return
            if report is not None:
                self._told[number].put(wire.decode_report(wire.encode(report)).value)

    def send(self, command, ranks=None):
        for rank in range(1, self.count + 1):
            if ranks is None or rank in ranks:
                self._asked[rank].put(wire.encode(command))

    def answers(self):
        answers = [told.get(timeout=PATIENCE) for told in self._told[1:]]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def read_adapter(self, ref, needed=True):
        self.send(wire.ReadAdapter(ref, needed))

    def started(self):
        pass

    def check(self):
        pass

    def late(self, ranks, seconds):
        if seconds > 60:
            raise EngineDead(f"{list(ranks)} are late")

    def lost(self, rank):
        with contextlib.suppress(queue.Empty):
            raise self._told[rank].get(timeout=60)
        raise EngineDead(f"rank {rank} is lost")

    def give_up(self, reason, kind=EngineDead):
        self.gone = True
        return kind(reason)

    def finish(self):
        for asked in self._asked[1:]:
            asked.put(None)
        for thread in self._threads:
            thread.join()
        for peer in (peer for peers in self._ends for peer in peers.values()):
            peer.close()

    end = finish


class Event:
    """Knows what was recorded, by its number; a stream that waits for it notes that."""

    def __init__(self, name, log):
        self.name, self._log, self.recorded = name, log, 0

    def record(self, stream):
        self.recorded += 1
        self._log.append(("record", self.name, stream.name))

    def query(self):
        return True

    def ipc_handle(self):
        return Cards.keep(self)


class Stream:
    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_event(self, event):
        self._log.append(("wait", event.name, self.name))

    def wait_stream(self, stream):
        pass


class Cards:
    """Memory and events by their handles, within this process. `reach`: one card reads another's."""

    shared: dict[bytes, object] = {}  # noqa: RUF012

    def __init__(self, reach=True, shares=True):
        self.device, self.log, self._reach, self._shares = torch.device("cpu"), [], reach, shares
        self._main, self._events = Stream("main", self.log), itertools.count()
        self.freed = self.closed = 0

    @classmethod
    def keep(cls, thing):
        handle = secrets.token_bytes(64)
        cls.shared[handle] = thing
        return handle

    def share(self, size):
        if not self._shares:
            raise RuntimeError("not supported")
        memory = torch.zeros(size, dtype=torch.uint8)
        return memory, self.keep(memory)

    def open(self, handle, size):
        memory = self.shared[handle]
        assert len(memory) == size
        return memory if self._reach else torch.zeros_like(memory)

    def free(self, memory):
        self.freed += 1

    def close(self, memory):
        self.closed += 1

    def event(self, shared=False):
        return Event(next(self._events), self.log)

    def open_event(self, handle):
        return self.shared[handle]

    def stream(self):
        return Stream("side", self.log)

    def current(self):
        return self._main

    def on(self, stream):
        return contextlib.nullcontext()
