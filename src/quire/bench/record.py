"""What is known of one request: when it was sent, when its tokens came, and how it ended. Times are seconds of one clock."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from quire.files.reading import shown
from quire.types.errors import ConfigError


@dataclass(slots=True)
class Record:
    due: float = 0.0  # when it should have been sent
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of every chunk that carried tokens
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True  # the server said how many tokens there were; otherwise they are the chunks
    asked_tokens: int = 0
    error: str | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        return self.end - self.sent

    @property
    def wait(self) -> float:
        """How long it waited in this client: for its turn in a closed loop, or for the client itself."""
        return self.sent - self.due

    @property
    def overall(self) -> float:
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None where there is no second one."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """One value for every token after the first: how long after its predecessor it could be seen.

        Tokens that come in one chunk (speculative decoding, a server that collects its output) are seen together, so all but
        one of them come 0 s after their predecessor. A stall is thereby told at its full length, the mean agrees with TPOT,
        and k tokens in one chunk measure the same as k chunks in one packet.
        """
        gaps = [after - before for before, after in pairwise(self.arrivals)]
        return gaps + [0.0] * (self.output_tokens - len(self.arrivals))


MOST_TOKENS = 1 << 24  # of one request; nor has anybody more prefixes, rows or runs
MOST_REQUESTS = 10**8
MOST_SECONDS = 1e13  # from the first request to the last, or to a timestamp from its beginning


def check_count(flag: str, value: int, least: int, most: int) -> int:
    """What a flag says."""
    if value < least:
        raise ConfigError(f"--{flag} must be at least {least}, got {value}")
    if value > most:
        raise ConfigError(f"--{flag} must be at most {most}, got {value}")
    return value


def read_tokens(where: str, field: str, value: Any, least: int) -> int:
    """What a file says."""
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not whole or value < least:
        raise ConfigError(f"{where}: {field} must be a whole number of {least} or more, got {shown(value)}")
    if value > MOST_TOKENS:
        raise ConfigError(f"{where}: {field} is {shown(value)}; no request has more than {MOST_TOKENS} tokens")
    return int(value)
