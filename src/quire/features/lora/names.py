"""Names and lora_int_ids of the loaded LoRA adapters, and the version of each. Lives in the API process, not in the engine:
every request carries its adapter's version, so a restarted engine has nothing to remember.

    load     give a name a version; an existing name needs load_inplace
    use      a request runs with the version that its name has when it arrives, until it ends
    remove   delete the name; running requests continue

Only digests of files are read here, in a thread that the caller chooses (`look`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from quire.files.adapter import AdapterBounds, check_header, count_added, digest, stamp
from quire.types.adapter import AdapterRef, LoRARequest
from quire.types.errors import AdapterError, InvalidParameter, NotSupported
from quire.types.prompts import Extras


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
