"""What one of several API processes is beside an ordinary server: its engines are the hub's, and what it counts it tells."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from quire.async_llm import AsyncLLM
from quire.config.resolve import resolve
from quire.device.registry import describe_unseen
from quire.engine.adapter_names import AdapterNames
from quire.engine.router import FleetHearer
from quire.obs.instruments import Board
from quire.obs.metrics import AdaptersInUse
from quire.obs.totals import take
from quire.serve.fronts import wire
from quire.serve.fronts.client import HubClient, SharedNames
from quire.serve.lifecycle import ServerState
from quire.types.errors import EngineDead

KEYS = 1 << 16  # of adapters: each process has those that are its number more than a multiple of this
TELL_EVERY = 1.0  # seconds; what was counted since is lost with a process that is killed


class Front:
    def __init__(self, begin: wire.Begin, line: wire.Line) -> None:
        self.begin, self._line = begin, line
        self.hub: HubClient | None = None

    def make(self) -> AsyncLLM:
        config = resolve(self.begin.args, lambda: "cpu", describe_unseen)
        return AsyncLLM(config, connect=self._connect, name=self.begin.name, share=self._share)

    def _share(self, names: AdapterNames) -> SharedNames:
        assert self.hub is not None
        names.number(int(self.begin.name.rstrip(".")), KEYS)
        self.hub.names = names
        return SharedNames(self.hub)

    async def tell_counts(
        self, state: ServerState, boards: Sequence[Board], adapters: Callable[[], AdaptersInUse] | None
    ) -> None:
        """From when requests are taken on."""
        hub = self.hub
        assert hub is not None

        def count() -> wire.Counts:
            _, waiting, running = (0, (), ()) if adapters is None else adapters()
            return wire.Counts(state.open, [take(board) for board in boards], (waiting, running))

        hub.counted = count
        hub.tell_open()
        with contextlib.suppress(EngineDead):
            while True:
                await asyncio.sleep(TELL_EVERY)
                hub.tell_counts()

    def _connect(self, hearer: FleetHearer) -> HubClient:
        self.hub = HubClient(self._line, self.begin.args.data_parallel_size, hearer)
        return self.hub
