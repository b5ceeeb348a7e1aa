"""Experts shared by several engines: every rank of every engine holds some experts of each layer, and runs them for all tokens.

    a turn    each rank publishes the tokens of the layer it is at ─► barrier ─► each runs its own experts of the first
              requested layer ─► publishes the outputs ─► barrier ─► the ranks that had tokens sum the outputs for them

Engines need not be in the same step: a rank at another layer, or without work, takes part without tokens, in a thread that
sleeps until a turn begins. Outputs are summed in rank order.

Tokens and outputs of ranks on GPUs go through the same shared memory of the host. The thread has a CUDA stream of its own: the
stream of steps may wait for another rank, which may wait for this turn. A turn's work on the GPU ends before the turn does.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.dist.mesh import Position
from quire.dist.shared_memory import SharedMemoryGroup
from quire.types.errors import EngineDead

HOST = torch.device("cpu")
NOTHING = -1  # layer number of a rank without tokens
HEADER = 4  # int64 values: layer, tokens, experts per token, padding
RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [T, H], weights and experts [T, top_k] -> [T, H]


@dataclass(frozen=True)
class ExpertWork:
    """Tokens that an engine wants a layer's experts to run."""

    layer: int
    x: Tensor  # [T, H]
    weights: Tensor  # [T, top_k] float32
    experts: Tensor  # [T, top_k] int64

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return sum(part.numel() * part.element_size() for part in (self.x, self.weights, self.experts))


class ExpertsGroup(SharedMemoryGroup):
    """The ranks of all engines."""

    chunk_bytes = 1 << 25

    def called(self, seconds: float | None = 0.0, wake: socket.socket | None = None) -> bool:
        """Return whether another rank has begun a turn or disconnected. seconds: maximum wait; None: no limit. `wake`, if
        readable, ends the wait."""
        waiting = select.poll()
        for end in (*self._peers.values(), *(() if wake is None else (wake,))):
            waiting.register(end, select.POLLIN)
        return bool(waiting.poll(None if seconds is None else 1000 * seconds))

    def offer(self, rows: ExpertWork | None) -> list[Tensor]:
        """Publish this rank's work; return the shared-memory slot of every rank, as views."""
        slots = self._next()
        header = slots[self._rank][: 8 * HEADER].view(torch.int64)
        if rows is None:
            header[0] = NOTHING
        else:
            header[:3] = torch.tensor([rows.layer, len(rows.x), rows.experts.shape[1]])
            for view, part in zip(_views(slots[self._rank], rows.x), (rows.experts, rows.weights, rows.x), strict=True):
                view.copy_(part)
        self._barrier()
        return list(slots)

    def add_up(self, part: Tensor, own: slice) -> Tensor:
        """Return rows `own` of the sum of all ranks' parts, which have one shape."""
        slots = self._next()
        flat = part.numel() * part.element_size()
        parts = [slot[:flat].view(part.dtype).view(part.shape) for slot in slots]
        parts[self._rank].copy_(part)
        self._barrier()
        out: Tensor = parts[0][own].clone()
        for other in parts[1:]:
            out += other[own]
        return out

    def leave(self) -> None:
        """Disconnect: other ranks notice it, and so does a thread of this one that waits for them."""
        for end in self._peers.values():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._peers.values():
            end.close()

    def _next(self) -> Tensor:
        slots = self._turns[self._turn]
        self._turn = 1 - self._turn
        return slots


def _views(slot: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of experts, weights and rows, after the header with their counts."""
    _, rows, top_k, _ = slot[: 8 * HEADER].view(torch.int64).tolist()
    begin = 8 * HEADER
    middle = begin + 8 * rows * top_k
    last = middle + 8 * -(-rows * top_k // 2)
    end = last + rows * like.shape[1] * like.element_size()
    return (
        slot[begin:middle].view(torch.int64).view(rows, top_k),
        slot[middle : middle + 4 * rows * top_k].view(torch.float32).view(rows, top_k),
        slot[last:end].view(like.dtype).view(rows, like.shape[1]),
    )


class SharedExperts:
    def __init__(
        self,
        group: ExpertsGroup,
        position: Position,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device = HOST,
    ) -> None:
        """ranks: number of ranks per engine; the first has the engine's tokens
        dtype: of the hidden states
        device: of the experts
        """
        self.position, self.leads = position, position.rank % ranks == 0
        self.group, self._engines, self._dtype, self._device = group, position.size // ranks, dtype, device
        self._layers: Sequence[tuple[int, RunExperts]] = ()
        self._lock = threading.Lock()  # held during a turn, by the engine or by the thread
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self._over = False
        self._dead: Exception | None = None
        self.on_dead: Callable[[Exception], None] = lambda _: None  # called by the thread

    def serve(self, layers: Sequence[tuple[int, RunExperts]]) -> None:
        """Run these layers for other engines; layers: (values per row, function), in the model's order."""
        self._layers = layers
        self._thread = threading.Thread(target=self._answer, name="quire-experts", daemon=True)
        self._thread.start()

    def wait_all(self) -> None:
        """Wait until all ranks serve."""
        with self._lock:
            self._turn(None)

    def check(self) -> None:
        """Raise EngineDead if another rank is lost."""
        if self._dead is not None:
            raise self._dead if isinstance(self._dead, EngineDead) else EngineDead(f"shared experts failed: {self._dead!r}")

    def run(self, layer: int, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if not len(x):
            return out
        all_rows = ExpertWork(layer, x.to(HOST), weights.float().to(HOST), experts.to(HOST, torch.int64))
        most = max(1, (self.group.chunk_bytes - 16 * HEADER) // (self._engines * -(-all_rows.size // len(x))))
        with self._lock:
            for first in range(0, len(x), most):
                few = slice(first, first + most)
                rows = ExpertWork(layer, all_rows.x[few], all_rows.weights[few], all_rows.experts[few])
                while (done := self._turn(rows)) is None:
                    pass
                out[few] = done
        return out

    def close(self) -> None:
        self._over = True
        self._wake.close()
        self.group.leave()
        if self._thread is not None:
            self._thread.join(1.0)
        if self._thread is None or not self._thread.is_alive():
            self.group.close()
            self._woken.close()

    def _answer(self) -> None:
        """Take part in turns of other engines while this engine has none."""
        with torch.inference_mode(), _own_stream(self._device):
            while not self._over:
                self.group.called(None, self._woken)
                with self._lock:
                    if self._over or self._dead is not None:
                        return
                    if self.group.called():
                        try:
                            self._turn(None)
                        except Exception as error:
                            self.on_dead(self._dead or error)
                            return

    def _turn(self, rows: ExpertWork | None) -> Tensor | None:
        """Take one turn. Return the outputs of `rows`; None if the turn was for another layer."""
        self.check()
        try:
            return self._take_turn(rows)
        except BaseException as error:
            self._dead = error if isinstance(error, Exception) else EngineDead(f"a turn was broken off: {error!r}")
            self.group.leave()
            self.check()
            raise

    def _take_turn(self, rows: ExpertWork | None) -> Tensor | None:
        slots = self.group.offer(rows)
        headers = [slot[: 8 * HEADER].view(torch.int64).tolist() for slot in slots]
        layer = min((header[0] for header in headers if header[0] != NOTHING), default=NOTHING)
        if layer == NOTHING:
            return None
        width, run = self._layers[layer]
        like = torch.empty(0, width, dtype=self._dtype)
        wanted = [(rank, _views(slot, like)) for rank, slot in enumerate(slots) if headers[rank][0] == layer]
        parts = (torch.cat(each) for each in zip(*(views for _, views in wanted), strict=True))
        experts, weights, x = (each.to(self._device) for each in parts)
        before = sum(headers[rank][1] for rank, _ in wanted if rank < self.position.rank)
        ours = rows is not None and rows.layer == layer
        total = self.group.add_up(run(x, weights, experts), slice(before, before + (len(rows.x) if rows and ours else 0)))
        return total if ours else None


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
