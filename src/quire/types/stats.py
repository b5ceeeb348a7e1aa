"""What an engine says about itself after every step, and who wants to hear it."""

from typing import Protocol

import msgspec

from quire.types.news import OutputObserver


class Stats(msgspec.Struct, frozen=True, array_like=True):
    running: int
    waiting: int  # parked children included
    pages: int
    free_pages: int  # cached ones included
    queries: int  # prompt tokens looked up in the prefix cache
    hits: int  # ... and found
    preemptions: int


class Observer(OutputObserver, Protocol):
    """Hears of requests, outputs and steps. Called on the event loop, so it must be quick and must not raise."""

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:
        """One turn of the engine's loop. `tokens_in_step` were run, prompt and output together; `now` is time.monotonic().

        `queries`, `hits` and `preemptions` count from the start of the engine process: they begin again after a restart.
        """
