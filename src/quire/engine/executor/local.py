"""Executors whose first rank is in this process: alone, or with other ranks in processes of `workers.py`.

Ranks run the same steps or are lost together. All ranks read LoRA adapters at the same time, and all have an adapter or none
(`features/lora/cache.py`).
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import AcceleratorError

from quire.device.base import Device
from quire.dist.collectives import RankGroup
from quire.dist.mesh import Position
from quire.engine.executor import wire
from quire.engine.executor.base import Flight
from quire.engine.executor.workers import Workers
from quire.features.lora.device import LoRAPart
from quire.progress import doing
from quire.runner.flight import StepFlight, device_lost
from quire.runner.step import Runner
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import AdapterChanged, AdapterError, EngineDead, EngineError
from quire.types.plan import Ints, StepPlan, StepResult, Words
from quire.types.stats import DeviceCounts

logger = logging.getLogger(__name__)


class LocalExecutor:
    """Run the device half in this process. On a CPU a step is finished when `submit` returns; on a GPU it is only launched.

    Steps may follow a failed one, unless the device itself reported an error: then nothing works in this process any more.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def counts(self) -> DeviceCounts:
        return self._runner.counts

    def submit(self, plan: StepPlan) -> Flight:
        try:
            return self._runner.launch(plan)
        except AcceleratorError as error:
            raise device_lost(error) from error

    def idle(self) -> bool:
        try:
            return self._runner.idle()
        except AcceleratorError as error:
            raise device_lost(error) from error

    def check(self) -> None:
        self._runner.check()

    def call(self, method: str, *args: Any) -> Any:
        return self.find(method)(*args)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return [self.call(method, *args)]

    def find(self, method: str) -> Callable[..., Any]:
        """Return a public method of the runner."""
        target = None if method.startswith("_") else getattr(self._runner, method, None)
        if not callable(target):
            raise EngineError(f"a runner has no method {method!r}")
        found: Callable[..., Any] = target
        return found

    def read_adapter(self, ref: AdapterRef) -> AdapterFacts:
        return self._runner.part(LoRAPart).cache.read(ref)

    def read_ahead(self, ref: AdapterRef) -> None:
        self._runner.part(LoRAPart).cache.read_ahead(ref)

    def put_adapter(self, ref: AdapterRef, slot: int) -> None:
        try:
            self._runner.part(LoRAPart).cache.put(ref, slot)
        except AcceleratorError as error:
            raise device_lost(error) from error

    def drop_adapter(self, slot: int) -> None:
        self._runner.part(LoRAPart).cache.drop(slot)

    def forget_adapter(self, version: str) -> None:
        self._runner.part(LoRAPart).cache.forget(version)

    def stop(self) -> None:
        self._runner.close()


def join_group(device: Device, workers: Workers, position: Position) -> RankGroup:
    """Connect the first rank to the others."""
    return device.group(position, workers.memory, workers.peers, workers, remote=workers.remote)


GUARD_POLL_S = 0.5  # between checks of the other ranks
ASK_DEVICE_AFTER_S = 1.0  # of waiting for a result, to find the rank that is late
DEVICE_ANSWER_TIMEOUT_S = 2.0  # for that question, which may wait for the same launch as this host


@dataclass
class HostCall:
    """What this host does that may wait for its device: between `began` and the end of the call."""

    began: float | None = None  # by the monotonic clock; None: no call runs
    in_step: bool = False


class RankGuard:
    """A thread that ends the collectives of this process when a rank has ended, or when a call of this host does not end
    because a rank is stopped or hangs: a launch waits for the device if its queue is full, and this host checks nothing then.

    It does not keep the ranks or the runner alive.
    """

    def __init__(self, workers: Workers, runner: Runner) -> None:
        self.freed, self._done, self._call = threading.Event(), threading.Event(), HostCall()
        arguments = weakref.ref(workers), weakref.ref(runner), self.freed, self._done, self._call
        self._thread = threading.Thread(target=_guard, args=arguments, name="quire-rank-guard", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, in_step: bool) -> Iterator[None]:
        """Watch a call of this host, the outermost one. in_step: it has the time limit of a step."""
        call = self._call
        if call.began is not None:
            yield
            return
        call.in_step, call.began = in_step, time.monotonic()
        try:
            yield
        finally:
            call.began = None

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def _guard(
    workers: weakref.ref[Workers],
    runner: weakref.ref[Runner],
    freed: threading.Event,
    done: threading.Event,
    call: HostCall,
) -> None:
    while not done.wait(GUARD_POLL_S):
        ranks, own = workers(), runner()
        if ranks is None or own is None:
            return
        if ranks.any_ended() or _is_blocked(ranks, own, call):
            freed.set()  # first: results that come from now on are of no use
            own.abandon()
            return
        del ranks, own


def _is_blocked(ranks: Workers, runner: Runner, call: HostCall) -> bool:
    """Return whether a rank keeps this host's call from ending. Log which: this host may never return to report it."""
    began = call.began
    if began is None:
        return False
    dead = ranks.find_blocking(time.monotonic() - began, call.in_step, partial(_ask_device, runner))
    if dead is not None:
        logger.error("%s", dead)
    return dead is not None


def _ask_device(runner: Runner) -> list[int]:
    """Return the ranks that the device waits for; none if the device does not answer in time."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(runner.late_ranks()), name="quire-late-ranks", daemon=True)
    thread.start()
    thread.join(DEVICE_ANSWER_TIMEOUT_S)
    return list(found)


class DividedExecutor(LocalExecutor):
    """An executor with several ranks, the first in this process."""

    def __init__(self, runner: Runner, workers: Workers) -> None:
        super().__init__(runner)
        self._workers = workers
        self._guard = RankGuard(workers, runner) if runner.waits_on_device else None

    def check(self) -> None:
        self._workers.check()
        super().check()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks; return the first rank's result."""
        return self.call_all(method, *args)[0]

    def call_all(self, method: str, *args: Any) -> list[Any]:
        self.check()
        target = self.find(method)
        self._workers.send(wire.CallRank(method, list(args)))
        with self.named_cause():
            own = target(*args)
        others = "another rank" if self._workers.count == 1 else f"{self._workers.count} other ranks"
        with doing(f"starting {others}, and loading the weights there" if method == "load" else f"waiting for {others}"):
            return [own, *self._workers.answers()]

    @contextmanager
    def named_cause(self) -> Iterator[None]:
        """If ranks ended and the device's collectives were ended for that, raise the cause, whatever the block did."""
        try:
            with self._watching(in_step=False):
                yield
        except EngineDead:
            raise
        except Exception:
            self.refuse_freed()
            raise
        self.refuse_freed()

    def _watching(self, in_step: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._guard is None else self._guard.watching(in_step)

    def refuse_freed(self) -> None:
        """Raise EngineDead if the device's results are of no use, because its collectives were ended."""
        if self._guard is not None and self._guard.freed.is_set():
            self._workers.check()

    def idle(self) -> bool:
        """As in LocalExecutor; if graphs contain collectives, all ranks record at the same time."""
        if self._runner.records_with_ranks:
            self._workers.send(wire.Idle())
        with self.named_cause():
            return super().idle()

    def send(self, command: wire.Command) -> None:
        """Send a command to all other ranks."""
        self._workers.send(command)

    def stop(self) -> None:
        with contextlib.suppress(EngineDead):
            self.check()
        lost = self._workers.gone
        if not lost:
            self._runner.synchronize()  # steps in flight need the other ranks
        if self._guard is not None:
            self._guard.stop()
        ended = not lost or self._runner.abandon()  # before the other ranks are killed: it ends their kernels too
        self._workers.finish()
        if ended:
            super().stop()  # if a GPU waits for a lost rank, freeing its memory would wait too

    def _meanwhile(self, seconds: float) -> None:
        """Check the other ranks while a result is awaited: it may need their data."""
        self.check()
        late = self._runner.late_ranks() if seconds > ASK_DEVICE_AFTER_S else []
        self._workers.late(late or range(1, 1 + self._workers.count), seconds)

    @contextmanager
    def _in_step(self, plan: StepPlan) -> Iterator[None]:
        """Guard what the first rank does for a step that other ranks have begun. Any exception, also an interrupt, ends all
        ranks. If a rank has ended, that is the cause.
        """
        try:
            with self._watching(in_step=True):
                yield
        except EngineDead:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self.refuse_freed()
            dead = self._workers.give_up(f"the ranks are out of step: step {plan.step} failed on the first: {error!r}")
            if isinstance(error, Exception):
                raise dead from error
            raise

    # ---- adapters --------------------------------------------------------------------------------------------------------

    def read_adapter(self, ref: AdapterRef) -> AdapterFacts:
        self._workers.read_adapter(ref)
        try:
            return super().read_adapter(ref)
        except BaseException:
            self._workers.read_adapter(ref, needed=False)
            raise

    def read_ahead(self, ref: AdapterRef) -> None:
        self._workers.read_adapter(ref)
        super().read_ahead(ref)

    def put_adapter(self, ref: AdapterRef, slot: int) -> None:
        self._refuse(ref, self._ask_others("hold_adapter", ref.version))
        self._send_others("put_adapter", ref.version, slot)
        try:
            super().put_adapter(ref, slot)
        except AdapterError:
            self._workers.answers()
            self._drop(slot)
            raise
        wrong = self._workers.answers()
        if any(wrong):
            self._drop(slot)
        self._refuse(ref, wrong)

    def drop_adapter(self, slot: int) -> None:
        self._drop(slot)

    def forget_adapter(self, version: str) -> None:
        super().forget_adapter(version)
        self._ask_others("forget_adapter", version)

    def _drop(self, slot: int) -> None:
        super().drop_adapter(slot)
        self._ask_others("drop_adapter", slot)

    def _refuse(self, ref: AdapterRef, wrong: Sequence[Sequence[str]]) -> None:
        """Raise what is wrong on the other ranks (`features.lora.cache.Wrong`)."""
        for rank, failure in enumerate(wrong, 1):
            if failure:
                kind, message = failure
                if kind == AdapterChanged.__name__:  # the caller may use the newer version
                    raise AdapterChanged(message, "lora_path")
                raise EngineError(f"rank {rank} cannot load {ref.path}: {message}")

    def _send_others(self, method: str, *args: Any) -> None:
        self.check()
        self._workers.send(wire.CallRank(method, list(args)))

    def _ask_others(self, method: str, *args: Any) -> list[Any]:
        self._send_others(method, *args)
        return self._workers.answers()


class RanksFlight:
    """A step of the first rank, which samples for all."""

    def __init__(self, flight: StepFlight, executor: "RanksExecutor") -> None:
        self._flight, self._executor = flight, executor

    def result(self) -> StepResult:
        with self._executor.named_cause():
            return self._flight.result()

    def sample(self, masks: Words) -> None:
        self._flight.sample(masks)
        self._executor.sampled = self._flight.sampled_ids()


class RanksExecutor(DividedExecutor):
    """Tensor parallelism: every plan goes to all ranks, with the tokens that the previous step sampled; all run it at the same
    time.

    A step that fails on one rank ends all of them.
    """

    def __init__(self, runner: Runner, workers: Workers) -> None:
        super().__init__(runner, workers)
        self.sampled: Ints | None = None  # by the latest step; the other ranks get it with the next

    def submit(self, plan: StepPlan) -> RanksFlight:
        self.check()
        sampled, self.sampled = self.sampled, None
        plan = self._runner.complete(plan)
        self._workers.send(wire.RunStep(sampled, plan))
        with self._in_step(plan):
            flight = self._runner.launch(plan)
        flight.before_following, flight.meanwhile = self._follow, self._meanwhile
        self.sampled = None if self._runner.samples_itself(plan) else flight.sampled_ids()
        return RanksFlight(flight, self)

    def _follow(self, lengths: Ints) -> None:
        """Let all ranks draft at the same time."""
        sampled, self.sampled = self.sampled, None
        self._workers.send(wire.Follow(np.empty(0, np.int32) if sampled is None else sampled, lengths))
