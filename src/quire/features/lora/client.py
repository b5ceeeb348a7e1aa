"""Adapters as the API process loads them: names here, files and devices in the engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from quire.config.features import cache_salt
from quire.features.lora.names import AdapterNames, NamedAdapter
from quire.types.adapter import AdapterRef, LoRARequest
from quire.types.errors import EngineDead, RequestError
from quire.types.request import EngineRequest

if TYPE_CHECKING:
    from quire.engine.handle import OneEngine


async def load_everywhere(engines: Sequence["OneEngine"], ref: AdapterRef, pinned: bool) -> None:
    """Returns when all engines have read it. An engine that is not there for good need not; what another refuses is raised."""
    living = [engine for engine in engines if engine.state != "dead"] or engines[:1]
    outcomes = await asyncio.gather(*(engine.load_adapter(ref, pinned) for engine in living), return_exceptions=True)
    errors = [outcome for outcome in outcomes if outcome is not None]
    wrong = [error for error in errors if not isinstance(error, EngineDead)] or (errors if len(errors) == len(living) else [])
    if wrong:
        raise wrong[0]


class Sharing(Protocol):
    """Where several processes give names to adapters, all of them know the same names."""

    def alone(self, name: str) -> AbstractAsyncContextManager[None]:
        """Nobody else changes meanwhile what the name means: who loads, replaces, pins or removes it waits for whoever does so
        already. What others made of it before is known here."""
        ...

    async def tell(self, name: str, adapter: NamedAdapter | None) -> None:
        """Returns when all others know what the name means now; None = nothing."""
        ...


class Unshared:
    """One process alone: its own tasks take turns."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            yield

    async def tell(self, name: str, adapter: NamedAdapter | None) -> None:
        pass


class AdapterClient:
    """`engines`: every one of them has every adapter."""

    def __init__(self, names: AdapterNames, engines: Sequence["OneEngine"], shared: Sharing | None = None) -> None:
        self._names, self._engines, self._shared = names, engines, shared or Unshared()
        self._looking: set[threading.Event] = set()  # to be set when nobody waits for it any more

    async def use(self, lora: LoRARequest, only_new: bool = False) -> NamedAdapter:
        """What its name means. If it is new or to be loaded again, it is loaded; if it cannot be, the name means what it meant
        before. `only_new`: a name that is there is refused, unless it is to be loaded again."""
        known = self._known(lora, only_new)
        if known is not None:
            return known
        async with self._shared.alone(lora.lora_name):
            return self._known(lora, only_new) or await self._load(lora)  # by now another may have loaded it

    def _known(self, lora: LoRARequest, only_new: bool) -> NamedAdapter | None:
        if only_new:
            self._names.check_new(lora)
        return self._names.known(self._names.check(lora))

    async def _load(self, lora: LoRARequest) -> NamedAdapter:
        found = await self._look(lora)
        ending = asyncio.create_task(self._agree(found))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:  # half of it would be a name that some processes know and others do not
            await asyncio.wait({ending})
            raise

    async def _look(self, lora: LoRARequest) -> NamedAdapter:
        """In a thread of its own: files may be large, and neither another adapter nor the end of the process waits for them."""
        loop, gone = asyncio.get_running_loop(), threading.Event()
        found: asyncio.Future[NamedAdapter] = loop.create_future()

        def tell(adapter: NamedAdapter | None, error: Exception | None) -> None:
            if adapter is not None and not found.done():
                found.set_result(adapter)
            elif error is not None and not found.done():
                found.set_exception(error)

        def expect(ref: AdapterRef) -> None:
            loop.call_soon_threadsafe(self._expect, ref)

        def look() -> None:
            adapter, failure = None, None
            try:
                adapter = self._names.look(lora, gone.is_set, expect)
            except Exception as error:
                failure = error
            with suppress(RuntimeError):  # the event loop is gone, and so will we be
                loop.call_soon_threadsafe(tell, adapter, failure)

        self._looking.add(gone)
        threading.Thread(target=look, name="quire-adapter", daemon=True).start()
        try:
            return await found
        finally:
            gone.set()
            self._looking.discard(gone)

    def _expect(self, ref: AdapterRef) -> None:
        """Engines read files while their version is made out."""
        for engine in self._engines:
            if engine.state != "dead":
                engine.tell("expect_adapter", ref.path, ref.stamp)

    def stop(self) -> None:
        """Who waits for files is told that there is no engine."""
        for gone in self._looking:
            gone.set()

    async def _agree(self, found: NamedAdapter) -> NamedAdapter:
        """Engines have it, and everybody knows its name."""
        try:
            await load_everywhere(self._engines, found.ref, found.pinned)
        except RequestError:
            self._retire(self._names.unnamed(found.ref.version))  # on engines that took it
            raise
        self._retire(self._names.put(found))
        await self._shared.tell(found.name, found)
        return found

    async def remove(self, key: int) -> bool:
        adapter = self._names.of_key(key)
        if adapter is None:
            return False
        async with self._shared.alone(adapter.name):
            if adapter.name not in self._names:  # any more
                return False
            self._retire(self._names.remove(adapter.name))
            await self._shared.tell(adapter.name, None)
        return True

    async def pin(self, key: int) -> bool:
        there = self._names.of_key(key)
        if there is None:
            return False
        async with self._shared.alone(there.name):
            adapter = self._names.find(there.name)  # by now another, perhaps
            if adapter is None:
                return False
            await load_everywhere(self._engines, adapter.ref, pinned=True)
            self._names.pin(adapter.name)
            await self._shared.tell(adapter.name, self._names.find(adapter.name))
        return True

    def renewed(self, request: EngineRequest) -> EngineRequest | None:
        """The same request with what its adapter's name means now. It had not begun, and the files of the version that it came
        for have been replaced; None if the name means no other."""
        old, now = request.extras, self._names.find(request.extras.lora_name)
        if now is None or old.lora is None or now.ref.version == old.lora.version:
            return None
        if old.lora.added or now.ref.added:
            return None  # its text was made into tokens of the other version
        extras = replace(old, lora=now.ref)
        kept = tuple(part for part in request.salt if part not in cache_salt(old))
        return replace(request, extras=extras, salt=(*cache_salt(extras), *kept))

    def tell_again(self, engine: int) -> None:
        """To an engine that has just started. What is asked for, it is told with the requests."""
        for ref in self._names.pinned:
            self._engines[engine].pin_again(ref)

    def _retire(self, version: str | None) -> None:
        """Behind the requests that are about to be sent."""
        if version is not None:
            for engine in self._engines:
                asyncio.get_running_loop().call_soon(engine.tell, "retire_adapter", version)
