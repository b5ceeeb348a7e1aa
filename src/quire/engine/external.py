"""Ranks that an external launcher such as torchrun starts: every rank runs the same script, and each `LLM` in it is one rank
of the model (`distributed_executor_backend="external_launcher"`).

    rank 0     its calls run as usual (`Leader`) ────────────── plans and calls, as to any rank ───────►  ┐
               ... and the outcome of each is sent to the others ── Did(step, deltas), Did(add), ... ──► │ the same calls
    others     (`Follower`) run plans until that outcome arrives, and return it as their own          ◄──┘ in their scripts

So all ranks return the same results. A rank that makes another call than rank 0 fails with an error.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from quire.config.config import Config
from quire.engine import ipc
from quire.engine.assemble import start_core
from quire.engine.core import EngineCore
from quire.engine.executor import wire
from quire.engine.executor.launch import LaunchedRank, read_launched_rank
from quire.engine.executor.worker import Rank, RankLost
from quire.engine.timeline import Stopwatch, Timeline
from quire.proc.channel import Frames
from quire.proc.spawn import anonymous_memory
from quire.progress import doing
from quire.types import errors
from quire.types.adapter import AdapterRef
from quire.types.errors import EngineDead, QuireError, RequestError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest
from quire.types.stats import NOTHING, Stats
from quire.types.structured import StructuredOutputsParams

T = TypeVar("T")


@dataclass(frozen=True)
class StartedRank:
    core: "EngineCore | Leader | Follower"
    max_model_len: int
    timeline: Timeline


def start_rank(config: Config, watch: Stopwatch) -> StartedRank:
    launched = read_launched_rank(os.environ, config.world)
    if launched.rank:
        follower = Follower(config, launched)
        watch.lap("rank")
        return StartedRank(follower, follower.max_model_len, watch.read())
    started = start_core(config, watch)
    if config.world == 1:
        return StartedRank(started.core, started.max_model_len, started.timeline)
    return StartedRank(
        Leader(started.core, config, started.max_model_len, started.pages), started.max_model_len, started.timeline
    )


class Checks:
    """Checks grammars before anything runs."""

    def __init__(self, check: Callable[[StructuredOutputsParams], None]) -> None:
        self.check = check


class Leader:
    """Rank 0's engine core."""

    number = 0

    def __init__(self, core: EngineCore, config: Config, max_model_len: int, pages: int) -> None:
        self.core = core
        self.constraints = Checks(lambda params: self._share("check", 0, lambda: core.constraints.check(params)))
        self._share("start", _digest_args(config), lambda: [max_model_len, pages])

    @property
    def stats(self) -> Stats:
        return self.core.stats

    @property
    def has_unfinished(self) -> bool:
        return self.core.has_unfinished

    def add(self, request: EngineRequest) -> None:
        self._share("add", _digest(request), lambda: self.core.add(request))

    def abort(self, ids: Iterable[str]) -> None:
        if names := list(ids):
            self._share("abort", len(names), lambda: self.core.abort(names))

    def release(self, ids: Iterable[str]) -> None:
        if names := list(ids):
            self._share("release", len(names), lambda: self.core.release(names))

    def step(self) -> list[TokenDelta]:
        core = self.core

        def report(deltas: list[TokenDelta]) -> ipc.Report:
            return ipc.StepReport(deltas, core.stats, core.tokens)

        return self._share("step", 0, core.step, report)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return self._share("reset_prefix_cache", int(preempt_running), lambda: self.core.reset_prefix_cache(preempt_running))

    def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:
        self._share("load_adapter", zlib.crc32(ref.path.encode()), lambda: self.core.adapters.load_now(ref, pinned))

    def retire_adapter(self, version: str) -> None:
        self._share("retire_adapter", 0, lambda: self.core.retire_adapter(version))

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return self._share("call_all", zlib.crc32(method.encode()), lambda: self.core.call_all(method, *args))

    def stop(self) -> None:
        self.core.stop()

    def _share(
        self,
        what: str,
        digest: int,
        call: Callable[[], T],
        report: Callable[[T], ipc.Report] = lambda value: ipc.Reply(0, value),
    ) -> T:
        """Call, and send the value or the error to the other ranks."""
        try:
            value = call()
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, QuireError) else EngineDead.__name__
            with contextlib.suppress(QuireError):
                self._send_outcome(what, digest, ipc.Reply(0, None, str(error), kind, getattr(error, "parameter", None)))
            if not isinstance(error, RequestError):
                self.core.executor.stop()  # no rank must wait for this one
            raise
        self._send_outcome(what, digest, report(value))
        return value

    def _send_outcome(self, what: str, digest: int, report: ipc.Report) -> None:
        self.core.executor.send(wire.Did(what, digest, ipc.encode(report)))  # type: ignore[attr-defined]


class Follower:
    """The engine core of another rank, whose results are those of rank 0."""

    number = 0
    has_unfinished = False  # rank 0 knows

    def __init__(self, config: Config, launched: LaunchedRank) -> None:
        self._name = f"rank {launched.rank}"
        with doing(f"{self._name}: waiting for rank 0 at {launched.address[0]}:{launched.address[1]}"):
            links = self._links = launched.join(config.args)
        control = links.controls[launched.rank]
        self._memory = anonymous_memory("quire-ranks")
        self._frames, self._rank = Frames(control), Rank(self._memory, {}, links.ends.get(launched.rank, {}))
        self._dead: str | None = None
        self.stats = NOTHING
        self.constraints = Checks(lambda _: self._outcome("check", 0))
        with doing(f"{self._name}: starting"):
            self.max_model_len, pages = self._outcome("start", _digest_args(config))
        self.stats = msgspec.structs.replace(NOTHING, pages=pages)

    def add(self, request: EngineRequest) -> None:
        self._outcome("add", _digest(request))

    def abort(self, ids: Iterable[str]) -> None:
        if names := list(ids):
            self._outcome("abort", len(names))

    def release(self, ids: Iterable[str]) -> None:
        if names := list(ids):
            self._outcome("release", len(names))

    def step(self) -> list[TokenDelta]:
        return list(self._outcome("step", 0))

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return bool(self._outcome("reset_prefix_cache", int(preempt_running)))

    def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:  # noqa: ARG002
        self._outcome("load_adapter", zlib.crc32(ref.path.encode()))

    def retire_adapter(self, version: str) -> None:  # noqa: ARG002
        self._outcome("retire_adapter", 0)

    def call_all(self, method: str, *args: Any) -> list[Any]:  # noqa: ARG002
        return list(self._outcome("call_all", zlib.crc32(method.encode())))

    def stop(self) -> None:
        if self._dead is None:
            self._dead = "the rank has been stopped"
            self._links.close()
            os.close(self._memory)

    def _outcome(self, what: str, digest: int) -> Any:
        """Run what rank 0 sends until the outcome of this call arrives; return it."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        try:
            outcome = self._serve()
        except (RankLost, OSError):
            raise self._lost(f"{self._name}: rank 0 has ended, or lost another rank") from None
        except QuireError as error:
            self._lost(f"{self._name}: {error}")
            raise
        except Exception as error:
            raise self._lost(f"{self._name} failed: {error!r}") from error
        if (outcome.what, outcome.digest) != (what, digest):
            raise self._lost(
                f"{self._name} called {what!r} and rank 0 {outcome.what!r}{' with other arguments' * (outcome.what == what)}. "
                "With distributed_executor_backend=external_launcher all ranks must make the same calls."
            )
        match ipc.decode_report(outcome.report):
            case ipc.StepReport(deltas, stats, _):
                self.stats = stats
                return deltas
            case ipc.Reply(_, value, None):
                return value
            case ipc.Reply(_, _, message, kind, parameter):
                raise self._error(str(message), kind, parameter)
        raise self._lost(f"{self._name}: rank 0 sent an invalid message")

    def _serve(self) -> wire.Did:
        while True:
            while (frame := self._frames.next()) is None:
                if not self._frames.receive():
                    raise RankLost
            command = wire.decode_command(frame)
            if isinstance(command, wire.Did):
                return command
            try:
                answer = self._rank.execute(command)
            except RankLost:
                raise
            except Exception as error:
                self._frames.send(wire.encode(wire.RankFailed(type(error).__name__, str(error), self._rank.step)))
                raise
            if answer is not None:
                self._frames.send(wire.encode(answer))

    def _lost(self, why: str) -> EngineDead:
        self.stop()
        self._dead = why
        return EngineDead(why)

    def _error(self, message: str, kind: str, parameter: str | None) -> QuireError:
        """Return the error that rank 0 raised."""
        found = getattr(errors, kind, EngineDead)
        if issubclass(found, RequestError):
            return found(message, parameter)
        return self._lost(f"rank 0: {message}")


def _digest(request: EngineRequest) -> int:
    params = request.params
    asked = (request.id, params.max_tokens, params.temperature, params.seed, request.fork_of)
    return zlib.crc32(np.asarray(request.prompt, "<i8").tobytes(), zlib.crc32(repr(asked).encode()))


def _digest_args(config: Config) -> int:
    return zlib.crc32(repr(sorted(asdict(config.args).items())).encode())
