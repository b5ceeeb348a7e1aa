"""Sizes of steps with prompts that a device which records steps records: others are run as the next larger one."""

MOST_TOKENS = 2048  # more keep the device busy while they are launched one by one
TOKEN_BUCKETS = (16, 32, *range(64, 1024, 64), *range(1024, MOST_TOKENS + 1, 256))


def recorded_width(tokens: int) -> int:
    """Tokens that are run for so many."""
    return next((width for width in TOKEN_BUCKETS if width >= tokens), tokens)
