"""Adapters of a rank other than the first: it reads what the first one reads, at the same time, in a thread of its own.

    first rank's reader   ── ReadAdapter ──►  asked, and nothing is waited for; steps go on
    between two steps     ── hold_adapter ─►  was it read? What is wrong is told, and nobody puts it anywhere
                          ── put_adapter ──►  all ranks at once: they may have to meet for it

What an adapter has for a rank depends on the rank, so each packs its own share of the same files.
"""

from quire.engine.adapter_reader import AdapterReader
from quire.runner.adapters import Shelf
from quire.types.adapter import AdapterRef
from quire.types.errors import EngineError, QuireError, RequestError

PATIENCE = 0.5  # seconds between looks

Wrong = list[str]  # what kind of error it is, and its message; empty = nothing


class RankAdapters:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self._reader = shelf, AdapterReader(shelf.read, shelf.read_ahead)
        self._refs: dict[str, AdapterRef] = {}  # by version: those that were asked for
        self._outcomes: dict[str, Wrong] = {}  # by version

    def ask(self, ref: AdapterRef) -> None:
        if not ref.version:
            self._reader.ask_ahead(ref)
            return
        self._refs[ref.version] = ref
        self._outcomes.pop(ref.version, None)
        self._reader.ask(ref)

    def hold_adapter(self, version: str) -> Wrong:
        """Waits for it."""
        if version not in self._refs:
            return _told(EngineError(f"adapter {version:.8} was never asked for"))
        while version not in self._outcomes and self._reader.pending:
            self._reader.wait(PATIENCE)
            for ref, outcome in self._reader.take():
                self._outcomes[ref.version] = _told(outcome) if isinstance(outcome, RequestError) else []
        return self._outcomes.get(version, [])

    def put_adapter(self, version: str, place: int) -> Wrong:
        try:
            self._shelf.put(self._refs[version], place)
        except RequestError as error:
            return _told(error)
        return []

    def drop_adapter(self, place: int) -> None:
        self._shelf.drop(place)

    def forget_adapter(self, version: str) -> None:
        self.hold_adapter(version)  # it may be on its way
        self._shelf.forget(version)
        self._refs.pop(version, None)
        self._outcomes.pop(version, None)


def _told(error: QuireError) -> Wrong:
    return [type(error).__name__, str(error)]
