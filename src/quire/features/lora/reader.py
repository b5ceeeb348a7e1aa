"""A thread that reads LoRA adapters, one after the other, while steps run."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from quire.files.adapter import digest, file_stamp
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import AdapterChanged, AdapterError, RequestError

Outcome = AdapterFacts | RequestError
STOP_TIMEOUT_S = 5.0  # for the file being read when the thread is stopped


class AdapterReader:
    """Starts its thread with the first request."""

    def __init__(self, read: Callable[[AdapterRef], AdapterFacts], read_ahead: Callable[[AdapterRef], None]) -> None:
        """read_ahead: reads files whose version (digest) is not known yet."""
        self._read, self._read_ahead = read, read_ahead
        self._asked: SimpleQueue[AdapterRef | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[AdapterRef, Outcome]] = SimpleQueue()
        self._seen: list[tuple[AdapterRef, Outcome]] = []  # received by `wait`, and not taken yet
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.pending = 0

    def ask(self, ref: AdapterRef) -> None:
        self.pending += 1
        self._put(ref)

    def ask_ahead(self, ref: AdapterRef) -> None:
        """Read files without a version if nothing else is requested; there is no outcome."""
        self._put(ref)

    def _put(self, ref: AdapterRef) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-adapters", daemon=True)
            self._thread.start()
        self._asked.put(ref)

    def take(self) -> list[tuple[AdapterRef, Outcome]]:
        """Return the outcomes since the last call."""
        taken, self._seen = self._seen, []
        while True:
            try:
                taken.append(self._done.get_nowait())
            except Empty:
                self.pending -= len(taken)
                return taken

    def wait(self, seconds: float) -> None:
        """Wait until there is an outcome to take, at most `seconds`."""
        if self.pending and not self._seen:
            try:
                self._seen.append(self._done.get(timeout=seconds))
            except Empty:
                return

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while (ref := self._asked.get()) is not None:
            if not ref.version:
                if self._asked.empty():
                    with suppress(Exception):  # the request for the version reports it
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
    """Read exactly the requested version: files may have been replaced since their digest was taken, or while being read.

    For files changed so recently that their stamp proves nothing, the digest is computed again.
    """
    before, stable = file_stamp(ref.path)
    if not (stable and before == ref.stamp) and digest(ref.path, gone) != ref.version:
        raise _changed(ref)
    facts = read(ref)
    after, _ = file_stamp(ref.path)
    if after != before or (not stable and digest(ref.path, gone) != ref.version):
        raise _changed(ref)
    return facts


def _changed(ref: AdapterRef) -> AdapterChanged:
    return AdapterChanged(
        f"{ref.path}: the adapter's files have changed since it was loaded; load it again, with load_inplace", "lora_path"
    )
