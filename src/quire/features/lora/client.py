"""LoRA adapters in the API process: names and lora_int_ids, the version of each name, and loading on all engines.

    load     give a name a version; an existing name needs load_inplace
    use      a request runs with the version that its name has when it arrives, until it ends
    remove   delete the name; running requests continue

Every request carries its adapter's version, so a restarted engine has nothing to remember. Only digests of files are read here,
in a thread (`AdapterNames.look`); engines read the weights.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from quire.config.features import cache_salt
from quire.files.adapter import AdapterBounds, check_header, count_added, digest, stamp
from quire.types.adapter import AdapterRef, LoRARequest
from quire.types.errors import AdapterError, EngineDead, InvalidParameter, NotSupported, RequestError
from quire.types.prompts import Extras
from quire.types.request import EngineRequest

if TYPE_CHECKING:
    from quire.engine.handle import OneEngine


# ---- names


@dataclass(frozen=True)
class NamedAdapter:
    name: str
    ref: AdapterRef
    base_model_name: str | None = None
    pinned: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def extras(self) -> Extras:
        return Extras(lora=self.ref, lora_name=self.name)


class AdapterNames:
    def __init__(
        self,
        enabled: bool,
        vocabulary: int | None = None,
        open_tokenizer: Callable[[AdapterRef], object] | None = None,
        bounds: AdapterBounds | None = None,
    ) -> None:
        """Make an empty table.

        vocabulary: size of the model's vocabulary; None: adapters cannot add tokens.
        open_tokenizer: opens the tokenizer of an adapter that adds tokens; raises what is wrong with it at load time.
        """
        self.enabled, self._vocabulary, self._open_tokenizer = enabled, vocabulary, open_tokenizer
        self._bounds = bounds or AdapterBounds()
        self._named: dict[str, NamedAdapter] = {}
        self._keys: dict[int, str] = {}  # number -> name
        self._fresh_keys = count(1)

    def number(self, first: int, step: int) -> None:
        """Draw new keys from this sequence, so that API processes draw different ones."""
        self._fresh_keys = count(first, step)

    def hear(self, name: str, adapter: NamedAdapter | None) -> None:
        """Apply a change by another API process; None: the name was removed."""
        old = self._named.pop(name, None)
        if old is not None:
            self._keys.pop(old.ref.key, None)
        if adapter is not None:
            self._named[name] = adapter
            self._keys[adapter.ref.key] = name

    def __len__(self) -> int:
        return len(self._named)

    def __contains__(self, name: str) -> bool:
        return name in self._named

    @property
    def all(self) -> list[NamedAdapter]:
        """Oldest first."""
        return list(self._named.values())

    @property
    def keys(self) -> set[int]:
        return set(self._keys)

    def find(self, name: str) -> NamedAdapter | None:
        return self._named.get(name)

    def of_key(self, key: int) -> NamedAdapter | None:
        return self._named.get(self._keys.get(key, ""))

    def fresh_key(self) -> int:
        return next(key for key in self._fresh_keys if key not in self._keys)

    # ---- loading ---------------------------------------------------------------------------------------------------------

    def check(self, lora: object) -> LoRARequest:
        """Raise errors that can be found without reading the files."""
        if not isinstance(lora, LoRARequest):
            raise InvalidParameter(f"lora_request must be a LoRARequest, got {type(lora).__name__}", "lora_request")
        if not self.enabled:
            raise NotSupported("lora_request cannot be used: the engine was started without enable_lora", "lora_request")
        owner = self._keys.get(lora.lora_int_id, lora.lora_name)
        if owner != lora.lora_name:
            raise InvalidParameter(
                f"lora_int_id {lora.lora_int_id} is the adapter {owner!r}; give {lora.lora_name!r} another one", "lora_request"
            )
        there = self._named.get(lora.lora_name)
        if there is not None and not lora.load_inplace and there.ref.path != absolute(lora.lora_path):
            raise InvalidParameter(
                f"the adapter {lora.lora_name!r} was loaded from another path; say load_inplace to replace it, or use another "
                "name",
                "lora_request",
            )
        return lora

    def check_new(self, lora: LoRARequest) -> None:
        """Refuse to load a name that exists, unless load_inplace is set."""
        if lora.lora_name in self._named and not lora.load_inplace:
            raise InvalidParameter(
                f"The lora adapter '{lora.lora_name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                "lora_name",
            )

    def known(self, lora: LoRARequest) -> NamedAdapter | None:
        """Return the loaded adapter of this name; None: it must be loaded first. Call `check` before."""
        return None if lora.load_inplace else self._named.get(lora.lora_name)

    def look(
        self, lora: LoRARequest, gone: Callable[[], bool] = bool, expect: Callable[[AdapterRef], None] | None = None
    ) -> NamedAdapter:
        """What the files are now. It reads them whole, so it may take a while, unless who asked is `gone`; it changes nothing
        here. `expect`: told before that, for whoever may read them at the same time; their version remains to be seen."""
        path = absolute(lora.lora_path)
        check_header(path, self._bounds)
        before = stamp(path)
        if before and expect is not None:
            expect(AdapterRef(lora.lora_int_id, "", path, stamp=before))
        version = digest(path, gone)
        there = self._named.get(lora.lora_name)
        key = lora.lora_int_id if there is None else there.ref.key
        added = 0 if self._vocabulary is None else count_added(path, self._vocabulary)
        ref = AdapterRef(key, version, path, added, before if stamp(path) == before else "")
        if added and self._open_tokenizer is not None:
            self._open_tokenizer(ref)
        return NamedAdapter(lora.lora_name, ref, lora.base_model_name, there is not None and there.pinned)

    def put(self, adapter: NamedAdapter) -> str | None:
        """Set the adapter of its name. Return the replaced version if no other name has it."""
        old = self._named.get(adapter.name)
        if old is None and self._keys.get(adapter.ref.key, adapter.name) != adapter.name:
            raise AdapterError(f"lora_int_id {adapter.ref.key} was taken by another adapter meanwhile", "lora_request")
        self._named[adapter.name] = adapter
        self._keys[adapter.ref.key] = adapter.name
        return None if old is None else self.unnamed(old.ref.version)

    def pin(self, name: str) -> None:
        if name in self._named:
            self._named[name] = replace(self._named[name], pinned=True)

    def remove(self, name: str) -> str | None:
        """As `put`."""
        adapter = self._named.pop(name)
        del self._keys[adapter.ref.key]
        return self.unnamed(adapter.ref.version)

    @property
    def pinned(self) -> list[AdapterRef]:
        return [adapter.ref for adapter in self._named.values() if adapter.pinned]

    def unnamed(self, version: str) -> str | None:
        """Return `version` if no name has it."""
        return None if any(adapter.ref.version == version for adapter in self._named.values()) else version


def absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


# ---- loading


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
