"""How much of anything a load may have. More is a slip, which would end in memory or in arithmetic."""

from typing import Any

from quire.files.reading import shown
from quire.types.errors import ConfigError

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
