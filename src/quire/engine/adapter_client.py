"""Adapters as the API process loads them: names here, files and devices in the engine."""

import asyncio
from dataclasses import replace

from quire.engine.adapter_names import AdapterNames, NamedAdapter
from quire.engine.view import OneEngine
from quire.types.adapter import LoRARequest
from quire.types.request import EngineRequest


class AdapterClient:
    def __init__(self, names: AdapterNames, client: OneEngine) -> None:
        self._names, self._client = names, client

    async def use(self, lora: LoRARequest) -> NamedAdapter:
        """What its name means. If it is new or to be loaded again, it is loaded; if it cannot be, the name means what it meant
        before."""
        known = self._names.known(self._names.check(lora))
        if known is not None:
            return known
        found = await asyncio.to_thread(self._names.look, lora)
        await self._client.load_adapter(found.ref, found.pinned)
        self._retire(self._names.put(found))
        return found

    def remove(self, key: int) -> bool:
        adapter = self._names.of_key(key)
        if adapter is not None:
            self._retire(self._names.remove(adapter.name))
        return adapter is not None

    async def pin(self, key: int) -> bool:
        adapter = self._names.of_key(key)
        if adapter is not None:
            await self._client.load_adapter(adapter.ref, pinned=True)
            self._names.pin(adapter.name)
        return adapter is not None

    def renewed(self, request: EngineRequest) -> EngineRequest | None:
        """The same request with what its adapter's name means now. It had not begun, and the files of the version that it came
        for have been replaced; None if the name means no other."""
        old, now = request.extras, self._names.find(request.extras.lora_name)
        if now is None or old.lora is None or now.ref.version == old.lora.version:
            return None
        extras = replace(old, lora=now.ref)
        salt = tuple(part for part in request.salt if part not in old.salt)
        return replace(request, extras=extras, salt=(*extras.salt, *salt))

    def tell_again(self) -> None:
        """To an engine that has just started. What is asked for, it is told with the requests."""
        for ref in self._names.pinned:
            self._client.pin_again(ref)

    def _retire(self, version: str | None) -> None:
        """Behind the requests that are about to be sent."""
        if version is not None:
            asyncio.get_running_loop().call_soon(self._client.tell, "retire_adapter", version)
