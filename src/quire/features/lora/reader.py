"""A thread that reads adapters while steps run: asked for one after the other, it tells what became of each."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from quire.files.adapter import digest, look_at
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import AdapterChanged, AdapterError, RequestError

Outcome = AdapterFacts | RequestError
FAREWELL = 5.0  # seconds for what is being read when it is stopped


class AdapterReader:
    """The thread is started by the first that is asked for."""

    def __init__(self, read: Callable[[AdapterRef], AdapterFacts], read_ahead: Callable[[AdapterRef], None]) -> None:
        """`read_ahead`: of files whose version is not known yet."""
        self._read, self._read_ahead = read, read_ahead
        self._asked: SimpleQueue[AdapterRef | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[AdapterRef, Outcome]] = SimpleQueue()
        self._seen: list[tuple[AdapterRef, Outcome]] = []  # by `wait`, and not taken yet
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.pending = 0

    def ask(self, ref: AdapterRef) -> None:
        self.pending += 1
        self._put(ref)

    def ask_ahead(self, ref: AdapterRef) -> None:
        """Without a version: nothing is told of it, and it is left aside if others are asked for."""
        self._put(ref)

    def _put(self, ref: AdapterRef) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-adapters", daemon=True)
            self._thread.start()
        self._asked.put(ref)

    def take(self) -> list[tuple[AdapterRef, Outcome]]:
        """What has become of those that were asked for, as far as it is known."""
        taken, self._seen = self._seen, []
        while True:
            try:
                taken.append(self._done.get_nowait())
            except Empty:
                self.pending -= len(taken)
                return taken

    def wait(self, seconds: float) -> None:
        """Until there is something to take, or for so long."""
        if self.pending and not self._seen:
            try:
                self._seen.append(self._done.get(timeout=seconds))
            except Empty:
                return

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(FAREWELL)

    def _run(self) -> None:
        while (ref := self._asked.get()) is not None:
            if not ref.version:
                if self._asked.empty():
                    with suppress(Exception):  # who asks for it will hear
                        self._read_ahead(ref)
                continue
            try:
                outcome: Outcome = read_unchanged(ref, self._read, self._stopped.is_set)
            except RequestError as error:
                outcome = error
            except Exception as error:
                outcome = AdapterError(f"{ref.path}: could not be read: {type(error).__name__}: {error}", "lora_path")
            self._done.put((ref, outcome))


def read_unchanged(
    ref: AdapterRef, read: Callable[[AdapterRef], AdapterFacts], gone: Callable[[], bool] = bool
) -> AdapterFacts:
    """Reads the version that is asked for, or nothing: files may have been replaced since their digest was taken, and may be
    while they are read. Of files that are too new only another digest tells."""
    before, settled = look_at(ref.path)
    if not (settled and before == ref.stamp) and digest(ref.path, gone) != ref.version:
        raise _changed(ref)
    facts = read(ref)
    after, _ = look_at(ref.path)
    if after != before or (not settled and digest(ref.path, gone) != ref.version):
        raise _changed(ref)
    return facts


def _changed(ref: AdapterRef) -> AdapterChanged:
    return AdapterChanged(
        f"{ref.path}: the adapter's files have changed since it was loaded; load it again, with load_inplace", "lora_path"
    )
