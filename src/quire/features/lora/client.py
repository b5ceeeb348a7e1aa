"""LoRA adapters in the API process: names and lora_int_ids, the version of each name, and loading on all engines.

    load     give a name a version; an existing name needs load_inplace
    use      a request runs with the version that its name has when it arrives, until it ends
    remove   delete the name; running requests continue

Every request carries its adapter's version, so a restarted engine has nothing to remember. Only digests of files are read here,
in a thread (`AdapterNames.resolve`); engines read the weights.
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

    def apply_change(self, name: str, adapter: NamedAdapter | None) -> None:
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
        old = self._named.get(lora.lora_name)
        if old is not None and not lora.load_inplace and old.ref.path != absolute(lora.lora_path):
            raise InvalidParameter(
                f"the adapter {lora.lora_name!r} was loaded from another path; set load_inplace to replace it, or use another "
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

    def resolve(
        self, lora: LoRARequest, gone: Callable[[], bool] = bool, expect: Callable[[AdapterRef], None] | None = None
    ) -> NamedAdapter:
        """Read the files' digest and return the adapter that they are now; the table does not change.

        gone: returns true if the caller has stopped waiting; reading then ends. expect: called before that with a reference
        without a version, so that engines can read the files at the same time."""
        path = absolute(lora.lora_path)
        check_header(path, self._bounds)
        before = stamp(path)
        if before and expect is not None:
            expect(AdapterRef(lora.lora_int_id, "", path, stamp=before))
        version = digest(path, gone)
        old = self._named.get(lora.lora_name)
        key = lora.lora_int_id if old is None else old.ref.key
        added = 0 if self._vocabulary is None else count_added(path, self._vocabulary)
        ref = AdapterRef(key, version, path, added, before if stamp(path) == before else "")
        if added and self._open_tokenizer is not None:
            self._open_tokenizer(ref)
        return NamedAdapter(lora.lora_name, ref, lora.base_model_name, old is not None and old.pinned)

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
        """Remove a name. Return its version if no other name has it."""
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
    """Load an adapter on all engines that are not dead, and return when all have it; raise the error of any engine."""
    living = [engine for engine in engines if engine.state != "dead"] or engines[:1]
    outcomes = await asyncio.gather(*(engine.load_adapter(ref, pinned) for engine in living), return_exceptions=True)
    errors = [outcome for outcome in outcomes if outcome is not None]
    wrong = [error for error in errors if not isinstance(error, EngineDead)] or (errors if len(errors) == len(living) else [])
    if wrong:
        raise wrong[0]


class Sharing(Protocol):
    """Keeps the names of adapters equal in all API processes."""

    def alone(self, name: str) -> AbstractAsyncContextManager[None]:
        """Lock the name: other tasks and processes that load, replace, pin or remove it wait. Their earlier changes have been
        applied here."""
        ...

    async def publish(self, name: str, adapter: NamedAdapter | None) -> None:
        """Set the adapter of a name in all other processes; None: the name is removed. Returns when all have applied it."""
        ...


class Unshared:
    """The names of a single API process: only its own tasks are serialized."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            yield

    async def publish(self, name: str, adapter: NamedAdapter | None) -> None:
        pass


class AdapterClient:
    """Loads, pins and removes adapters on all engines."""

    def __init__(self, names: AdapterNames, engines: Sequence["OneEngine"], shared: Sharing | None = None) -> None:
        self._names, self._engines, self._shared = names, engines, shared or Unshared()
        self._reading: set[threading.Event] = set()  # set when no task waits for the read any more

    async def use(self, lora: LoRARequest, only_new: bool = False) -> NamedAdapter:
        """Return the adapter of the request's name. It is loaded if it is new or load_inplace is set; an error changes nothing.

        only_new: a name that exists is refused without load_inplace.
        """
        known = self._known(lora, only_new)
        if known is not None:
            return known
        async with self._shared.alone(lora.lora_name):
            return self._known(lora, only_new) or await self._load(lora)  # another task may have loaded it meanwhile

    def _known(self, lora: LoRARequest, only_new: bool) -> NamedAdapter | None:
        if only_new:
            self._names.check_new(lora)
        return self._names.known(self._names.check(lora))

    async def _load(self, lora: LoRARequest) -> NamedAdapter:
        found = await self._resolve(lora)
        ending = asyncio.create_task(self._agree(found))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:  # stopping half-way would leave a name that only some processes have
            await asyncio.wait({ending})
            raise

    async def _resolve(self, lora: LoRARequest) -> NamedAdapter:
        """Read the files' version in a thread of its own: files may be large, and nothing else may wait for them."""
        loop, gone = asyncio.get_running_loop(), threading.Event()
        found: asyncio.Future[NamedAdapter] = loop.create_future()

        def deliver(adapter: NamedAdapter | None, error: Exception | None) -> None:
            if adapter is not None and not found.done():
                found.set_result(adapter)
            elif error is not None and not found.done():
                found.set_exception(error)

        def expect(ref: AdapterRef) -> None:
            loop.call_soon_threadsafe(self._expect, ref)

        def read() -> None:
            adapter, failure = None, None
            try:
                adapter = self._names.resolve(lora, gone.is_set, expect)
            except Exception as error:
                failure = error
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(deliver, adapter, failure)

        self._reading.add(gone)
        threading.Thread(target=read, name="quire-adapter", daemon=True).start()
        try:
            return await found
        finally:
            gone.set()
            self._reading.discard(gone)

    def _expect(self, ref: AdapterRef) -> None:
        """Let engines read the files while their version is computed."""
        for engine in self._engines:
            if engine.state != "dead":
                engine.notify("expect_adapter", ref.path, ref.stamp)

    def stop(self) -> None:
        """Stop reading files; tasks that wait for them fail."""
        for gone in self._reading:
            gone.set()

    async def _agree(self, found: NamedAdapter) -> NamedAdapter:
        """Load the adapter on all engines, then publish its name."""
        try:
            await load_everywhere(self._engines, found.ref, found.pinned)
        except RequestError:
            self._retire(self._names.unnamed(found.ref.version))  # on engines that loaded it
            raise
        self._retire(self._names.put(found))
        await self._shared.publish(found.name, found)
        return found

    async def remove(self, key: int) -> bool:
        adapter = self._names.of_key(key)
        if adapter is None:
            return False
        async with self._shared.alone(adapter.name):
            if adapter.name not in self._names:  # meanwhile
                return False
            self._retire(self._names.remove(adapter.name))
            await self._shared.publish(adapter.name, None)
        return True

    async def pin(self, key: int) -> bool:
        old = self._names.of_key(key)
        if old is None:
            return False
        async with self._shared.alone(old.name):
            adapter = self._names.find(old.name)  # it may have changed meanwhile
            if adapter is None:
                return False
            await load_everywhere(self._engines, adapter.ref, pinned=True)
            self._names.pin(adapter.name)
            await self._shared.publish(adapter.name, self._names.find(adapter.name))
        return True

    def renewed(self, request: EngineRequest) -> EngineRequest | None:
        """Return the request with the present version of its adapter's name; None if that is the same version.

        Called for a request that had not begun when the files of its version were replaced."""
        old, now = request.extras, self._names.find(request.extras.lora_name)
        if now is None or old.lora is None or now.ref.version == old.lora.version:
            return None
        if old.lora.added or now.ref.added:
            return None  # its prompt was tokenized with the vocabulary of the old version
        extras = replace(old, lora=now.ref)
        others = tuple(part for part in request.salt if part not in cache_salt(old))
        return replace(request, extras=extras, salt=(*cache_salt(extras), *others))

    def pin_again(self, engine: int) -> None:
        """Pin adapters on an engine that has just started. Requests bring their own adapters along."""
        for ref in self._names.pinned:
            self._engines[engine].pin_again(ref)

    def _retire(self, version: str | None) -> None:
        """Retire a version on all engines, after the requests that are about to be sent."""
        if version is not None:
            for engine in self._engines:
                asyncio.get_running_loop().call_soon(engine.notify, "retire_adapter", version)
