"""Whether waiting for pages of host memory or disk is faster than computing their tokens."""

DECAY = 0.95  # of what was measured, per measurement


class Speeds:
    """Estimates of how long it takes to fetch or read pages, and to compute tokens."""

    def __init__(self) -> None:
        self._least, self._pages, self._tokens = 0.0, 0.0, 0.0  # seconds of a fetch; pages and tokens per second

    def fetched(self, pages: int, seconds: float) -> None:
        seconds = max(seconds, 1e-6)
        self._least = min(self._least / DECAY, seconds) if self._least else seconds
        self._pages = max(self._pages * DECAY, pages / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        self._tokens = max(self._tokens * DECAY, tokens / max(seconds, 1e-6))

    def pays(self, pages: int, tokens: int) -> bool:
        """Return whether fetching these pages is faster than computing their tokens; True while it is unknown."""
        if not self._pages or not self._tokens or max(self._least, pages / self._pages) <= tokens / self._tokens:
            return True
        self._least *= DECAY  # so that it is tried again
        self._pages /= DECAY
        return False
