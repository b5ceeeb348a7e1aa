"""Messages between processes: msgspec structs in msgpack. Numpy arrays are sent as dtype, shape and bytes.

`PendingCalls` matches replies to calls over a channel: each call has a number, and its reply the same one.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np


class WireMessage(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages. The class name is the tag, so a union of messages can be decoded."""


def _from_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_from_array).encode


def decoder(messages: Any, dtypes: Collection[str] = (), writable: bool = False) -> Callable[[bytes], Any]:
    """Return the decoder of a message class or of a union of them.

    dtypes: of the arrays that may arrive, such as "<i4".
    writable: copy arrays, so that the receiver may write to them.
    """

    def to_array(kind: Any, value: Any) -> Any:
        if getattr(kind, "__origin__", kind) is not np.ndarray:
            raise TypeError(f"a {kind} cannot be received from another process")
        dtype, shape, data = value
        if dtype not in dtypes:
            raise TypeError(f"an array of {dtype} cannot be received; only {', '.join(dtypes)} can")
        array = np.frombuffer(data, dtype).reshape(shape)
        return array.copy() if writable else array

    return msgspec.msgpack.Decoder(messages, dec_hook=to_array).decode


class PendingCalls:
    """Calls whose reply has not arrived."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[Any]] = {}

    def number(self) -> int:
        """Return the number of a call whose reply is not awaited."""
        return next(self._numbers)

    async def ask(self, send: Callable[[int], None]) -> Any:
        """Send a call and return its reply. `send` gets the number of the call."""
        number = next(self._numbers)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            return await future
        finally:
            del self._futures[number]

    def resolve(self, number: int, value: Any, error: Exception | None = None) -> None:
        """Deliver a reply. Replies to unknown numbers are ignored: their caller was cancelled."""
        future = self._futures.get(number)
        if future is not None and not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """The peer is gone: raise `error` in all callers."""
        for number in list(self._futures):
            self.resolve(number, None, error)
