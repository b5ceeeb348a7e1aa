"""What `collective_rpc` may call on every rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.types.errors import InvalidParameter, NotSupported

RANK_METHODS = ("check_health", "describe_rank")


def check_rank_call(method: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    if not isinstance(method, str):
        raise NotSupported("collective_rpc takes the name of a method: no code is sent to ranks", "method")
    if method not in RANK_METHODS:
        raise InvalidParameter(f"ranks have no method {method!r}; they have {', '.join(RANK_METHODS)}", "method")
    if args or kwargs:
        raise NotSupported(f"collective_rpc: {method} takes no arguments", "args")
