"""An engine as the API process sees it: requests go in, deltas come out, and the loss of an engine is only a pause.

For every open request the client keeps the request and the tokens it has reported. After a loss the next engine gets all of
them again, and each request continues after its tokens: random numbers, penalties and limits depend on positions only.

A request that crashes engines must not block the others forever. A request that was running in two crashes in a row without
progress is a suspect. Suspects are sent last and one at a time, the next when the previous one has made progress. After
MAX_STRIKES such crashes a request ends with an error.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.engine import ipc
from quire.engine.child import COMMAND, Child, engine_fork_server, forks_engines
from quire.engine.handle import RANK_METHODS, EngineListener, EngineStatus, EngineView, State
from quire.engine.node_listener import EngineNodes, RemoteEngine
from quire.engine.supervisor import AnyChild, Supervisor, SupervisorLimits
from quire.features.experts.peers import ExpertPeers
from quire.proc.fork_server import LazyForkServer
from quire.progress import doing, shown
from quire.types.adapter import AdapterRef
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import ConfigError, EngineDead, EngineError, InvalidParameter, QuireError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest, FinishReason
from quire.types.stats import Stats

SUSPECT_STRIKES, MAX_STRIKES = 2, 3
MAX_MESSAGE_TOKENS = 1 << 16  # of requests in one message to the engine
BYTES_PER_TOKEN = 4  # of images and videos, for that limit

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class OpenRequest:
    """A request that is not finished."""

    spec: EngineRequest
    tokens: list[int] = field(default_factory=list)
    scored: int = 0  # prompt positions whose logprobs were reported
    strikes: int = 0  # crashes in a row while it was running, without progress in between
    sent_with: int = -1  # `reported` when the present engine got it; -1: it has not got it

    @property
    def reported(self) -> int:
        return len(self.tokens) + self.scored

    @property
    def progressed(self) -> bool:
        return self.reported > self.sent_with

    def replayed(self) -> EngineRequest:
        self.sent_with = self.reported
        return replace(self.spec, resumed=tuple(self.tokens), scored=self.scored) if self.reported else self.spec


@dataclass(eq=False, slots=True)
class OpenCall:
    """A call to the engine; the next engine gets it if this one is lost."""

    command: ipc.CallMethod | ipc.LoadAdapter
    future: asyncio.Future[Any]
    strikes: int = 0
    sent: bool = False


class EngineClient(EngineView):
    """One engine, restarted when it is lost."""

    def __init__(
        self,
        args: EngineArgs,
        listener: EngineListener,
        command: Sequence[str] = COMMAND,
        engine: int = 0,
        serving: bool = True,
        fork_server: LazyForkServer | None = None,
        nodes: EngineNodes | None = None,
        expert_peers: ExpertPeers | None = None,
    ) -> None:
        """Start an engine.

        engine: its number, of several.
        serving: requests arrive while others run.
        fork_server: closed with this client. It forks all engine processes if warm_restart is set: the first one waits until
            the server has imported what it would import itself.
        nodes: the engine is on one of these.
        expert_peers: engines that share its experts.
        """
        if args.distributed_executor_backend == "ray":
            from quire.engine.executor.ray_nodes import export_group

            export_group()
        self._listener, self._number, self._elsewhere = listener, engine, nodes is not None
        self._fork_server = fork_server or engine_fork_server()
        if forks_engines(args) and tuple(command) == COMMAND and nodes is None:
            self._fork_server.prepare()
            with shown(write_line=logger.info), doing("importing torch"):
                self._fork_server.get(args.engine_start_timeout)
        self._open: dict[str, OpenRequest] = {}
        self._suspects: deque[OpenRequest] = deque()
        self._probe: OpenRequest | None = None  # the suspect that is running
        self._calls: dict[int, OpenCall] = {}
        self._numbers = itertools.count()
        self._outbox: deque[OpenRequest] = deque()  # to be sent
        self._sending = False  # the rest will be sent soon
        self._sent_now: list[OpenRequest] = []  # in a message that is being sent
        self.replayed_requests = 0  # requests that a lost engine had
        self._watched = False
        self.heir: Callable[[list[OpenRequest]], list[OpenRequest]] = lambda orphans: orphans  # see `on_dead`
        self.relief: Callable[[list[OpenRequest]], list[OpenRequest]] = lambda _: []  # returns those taken
        self.on_given_up: Callable[[QuireError], None] = lambda error: None  # noqa: ARG005
        self.stats: Stats | None = None  # of the latest step
        self.pages = 0  # of the cache; 0 until an engine is ready

        def start() -> AnyChild:
            if nodes is not None:
                return RemoteEngine(args, nodes, engine, serving)
            ends = None if expert_peers is None else expert_peers.take(engine)
            try:
                return Child(args, command, engine, serving, self._fork_server.get(), ends)
            finally:
                if ends is not None:
                    ends.close()

        name = "the engine" if args.data_parallel_size == 1 else f"engine {engine}"
        self.supervisor = Supervisor(start, SupervisorLimits.of(args), self, name)

    # ---- state -----------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> "list[EngineClient]":
        """Itself; a router has several."""
        return [self]

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def status(self) -> EngineStatus:
        one = self.supervisor
        error = None if one.error is None else str(one.error)
        return EngineStatus(
            one.state, one.received_at, one.busy_for, one.restarts, self.replayed_requests, one.last_loss, one.pid,
            self.pages, self.stats, error,
        )  # fmt: skip

    @property
    def state(self) -> State:
        return self.supervisor.state

    async def wait_ready(self) -> None:
        """Return when the engine takes requests; raise why it could not start."""
        await self.supervisor.wait_ready()

    async def run(self) -> None:
        """Receive reports until the engine is dead. May be cancelled and run again, on another event loop too."""
        await self.supervisor.run()

    # ---- commands --------------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Add requests. Those that cannot be sent now are sent when an engine is ready."""
        self.check()
        fresh = [OpenRequest(request) for request in requests]
        self._open.update((entry.spec.id, entry) for entry in fresh)
        if self.supervisor.state != "ready":
            return
        try:
            self._send(fresh)
        except BaseException:
            for entry in fresh:
                del self._open[entry.spec.id]
            raise

    def abort(self, ids: Iterable[str]) -> None:
        """End requests: nothing more is reported of them. Unknown ids are ignored."""
        gone = [entry for name in ids if (entry := self._open.pop(name, None)) is not None]
        sent = [entry.spec.id for entry in gone if entry.sent_with >= 0]
        if sent and self.supervisor.state == "ready":
            self.supervisor.send(ipc.Abort(sent))
        self._go_on()

    def watch(self, watched: bool) -> None:
        """Let this engine and those after it report snapshots, or stop it."""
        self._watched = watched
        if self.supervisor.state == "ready":
            self.supervisor.send(ipc.SetWatched(watched))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core; wait for an engine if none is ready."""
        command = ipc.CallMethod(next(self._numbers), method, list(args))
        if method == "call_all" and args[0] not in RANK_METHODS:
            with self.supervisor.patient():
                return await self._answer(command)
        return await self._answer(command)

    async def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:
        """Return when the engine has read the adapter; raise why it cannot."""
        await self._answer(ipc.LoadAdapter(next(self._numbers), ref, pinned))

    def notify(self, method: str, *args: Any) -> None:
        """Call a method without waiting; does nothing if no engine is ready."""
        if self.supervisor.state == "ready":
            self.supervisor.send(ipc.CallMethod(next(self._numbers), method, list(args)))

    def pin_again(self, ref: AdapterRef) -> None:
        """Pin an adapter that the previous engine had pinned."""
        self.supervisor.send(ipc.LoadAdapter(next(self._numbers), ref, pinned=True))

    async def _answer(self, command: ipc.CallMethod | ipc.LoadAdapter) -> Any:
        self.check()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[command.id] = call = OpenCall(command, future)
        if self.supervisor.state == "ready":
            self._ask(call)
        try:
            return await future
        finally:
            del self._calls[command.id]

    def check(self, engine: int | None = None) -> None:
        """Raise EngineDead if no engine will ever be ready again, InvalidParameter if this number is out of range."""
        check_number(engine, 1)
        if self.supervisor.state == "dead":
            raise EngineDead(str(self.supervisor.error))

    def stop(self, timeout: float) -> None:
        """End the engine. Open requests end with `abort`."""
        self.supervisor.stop(timeout)
        self._fork_server.close()
        self._end_all("abort", None, EngineDead("the engine was shut down"))

    # ---- reports (called by the supervisor) ------------------------------------------------------------------------------

    def on_ready(self, ready: ipc.Ready) -> None:
        self.pages = ready.pages
        self._listener.on_ready(ready, self._number)
        if self._watched:
            self.supervisor.send(ipc.SetWatched(True))
        waiting = sorted(self._open.values(), key=lambda entry: entry.strikes)
        self._suspects = deque(entry for entry in waiting if entry.strikes >= SUSPECT_STRIKES)
        self._send([entry for entry in self._open.values() if entry.strikes < SUSPECT_STRIKES])
        for call in self._calls.values():
            self._ask(call)
        if len(self._suspects) == len(self._open):
            self._go_on()

    def on_deltas(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            entry = self._open.get(delta.request_id)
            if entry is None:
                continue
            if delta.finish_reason is not None:
                del self._open[delta.request_id]
            else:
                entry.tokens += delta.token_ids
                for scores in delta.prompt_logprobs:
                    entry.scored += len(scores.rank)
        self._listener.on_deltas(deltas, self._number)
        self._go_on()

    def on_step(self, report: ipc.StepReport) -> None:
        self.stats = report.stats
        self._listener.on_step(report, self._number)

    def on_snapshot(self, snapshot: EngineSnapshot) -> None:
        self._listener.on_snapshot(snapshot, self._number)

    def on_answer(self, answer: ipc.Refused | ipc.Reply) -> None:
        match answer:
            case ipc.Refused(name):
                entry = self._open.pop(name, None)
                if (
                    entry is not None and entry.reported and not answer.added
                ):  # the new engine is smaller than the one that accepted it
                    self._listener.on_deltas(
                        [_last(name, "error", f"it could not continue after a restart: {answer.message}")], self._number
                    )
                elif entry is not None:
                    self._listener.on_refused(name, ipc.request_error(answer))
                self._go_on()
            case ipc.Reply(number, value, error):
                call = self._calls.get(number)
                future = None if call is None else call.future
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(value)
                    else:
                        future.set_exception(ipc.reply_error(answer))

    def on_lost(self, in_flight: set[str]) -> None:
        self.stats = None
        for name, entry in self._open.items():
            if entry.sent_with >= 0:
                entry.strikes = 0 if entry.progressed else entry.strikes + (name in in_flight)
                entry.sent_with = -1
        self._suspects.clear()
        self._probe = None
        guilty = [name for name, entry in self._open.items() if entry.strikes >= MAX_STRIKES]
        for name in guilty:
            del self._open[name]
        if guilty:
            why = f"the engine was lost {MAX_STRIKES} times in a row while it ran this request"
            self._listener.on_deltas([_last(name, "error", why) for name in guilty], self._number)
        for call in self._calls.values():
            call.strikes, call.sent = call.strikes + call.sent, False
            if call.strikes >= MAX_STRIKES and not call.future.done():
                call.future.set_exception(EngineDead(f"the engine was lost {MAX_STRIKES} times in a row during this call"))
        if self._elsewhere and self._open:  # its node may never connect again
            left = self.heir(list(self._open.values()))
            self._open = {entry.spec.id: entry for entry in left}
        self.relieve()

    def relieve(self) -> None:
        """Let other engines take requests that had not begun, while this engine restarts."""
        if self.supervisor.state not in ("ready", "dead"):
            not_begun = [entry for entry in self._open.values() if not entry.reported and not entry.strikes]
            for entry in self.relief(not_begun):
                del self._open[entry.spec.id]

    def on_dead(self, error: QuireError) -> None:
        """End requests when the engine is given up; those that another engine takes continue there."""
        orphans = list(self._open.values())
        left = self.heir(orphans) if orphans else []
        self._open = {entry.spec.id: entry for entry in left}
        self._end_all("error", str(error), error)
        self.on_given_up(error)

    def adopt(self, entries: Iterable[OpenRequest]) -> None:
        """Continue requests of another engine after the tokens that they have."""
        for entry in entries:
            entry.sent_with = -1
            self._open[entry.spec.id] = entry
            if entry.strikes >= SUSPECT_STRIKES:
                self._suspects.append(entry)
        if self.supervisor.state == "ready":
            self._send([entry for entry in self._open.values() if entry.sent_with < 0 and entry.strikes < SUSPECT_STRIKES])
            self._go_on()

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _ask(self, call: OpenCall) -> None:
        call.sent = True
        self.supervisor.send(call.command)

    def _send(self, entries: Sequence[OpenRequest]) -> None:
        """Send requests in several messages, so that other tasks run in between."""
        self._outbox.extend(entries)
        if not self._sending:
            self._send_some()

    def _send_some(self) -> None:
        self._sending = False
        if self.supervisor.state != "ready":
            self._outbox.clear()  # all open requests will be sent to the next engine
            return
        batch: list[OpenRequest] = []
        prompts, tokens = set[int](), 0
        while self._outbox and tokens < MAX_MESSAGE_TOKENS:
            entry = self._outbox.popleft()
            if self._open.get(entry.spec.id) is not entry or entry.sent_with >= 0:
                continue
            tokens += len(entry.tokens) + entry.spec.media_bytes // BYTES_PER_TOKEN
            tokens += 0 if id(entry.spec.prompt) in prompts else len(entry.spec.prompt)
            prompts.add(id(entry.spec.prompt))
            batch.append(entry)
        if self._outbox:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_rest)
        self._sent_now = batch
        if batch:
            self.replayed_requests += sum(1 for entry in batch if entry.reported or entry.strikes)
            self.supervisor.send(ipc.add([entry.replayed() for entry in batch]))
            self._sent_now = []

    def _send_rest(self) -> None:
        """Send the next message. It runs as a callback: what cannot be sent is reported as a refusal."""
        try:
            self._send_some()
        except Exception as error:
            refusal = error if isinstance(error, QuireError) else EngineError(f"{type(error).__name__}: {error}")
            for entry in self._sent_now:
                if self._open.pop(entry.spec.id, None) is not None:
                    self._listener.on_refused(entry.spec.id, refusal)

    def _go_on(self) -> None:
        """Send the next suspect when the previous one has made progress or is gone."""
        probe = self._probe
        if probe is not None and not probe.progressed and probe.spec.id in self._open:
            return
        self._probe = None
        while self._suspects and self._probe is None:
            entry = self._suspects.popleft()
            if self._open.get(entry.spec.id) is entry:
                self._probe = entry
                self._send([entry])

    def _end_all(self, reason: FinishReason, why: str | None, error: QuireError) -> None:
        names = list(self._open)
        self._open.clear()
        self._suspects.clear()
        self._probe = None
        for future in (call.future for call in self._calls.values()):
            if not future.done():
                future.set_exception(EngineDead(str(error)))
        if names:
            self._listener.on_deltas([_last(name, reason, why) for name in names], self._number)


def check_number(engine: int | None, engines: int) -> None:
    """Raise InvalidParameter if a request names an engine that does not exist."""
    if engine is not None and not 0 <= engine < engines:
        there = "there is one engine, 0" if engines == 1 else f"there are {engines} engines, 0 to {engines - 1}"
        raise InvalidParameter(f"data_parallel_rank {engine} is out of range: {there}", "data_parallel_rank")


def engine_args(config: Config) -> EngineArgs:
    """Return the arguments of engine processes, with files that were found: no start or restart contacts the hub again."""
    if config.args.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend=external_launcher is for LLM, whose script every rank runs; a server, AsyncLLM and "
            "data_parallel_size start their ranks themselves: use mp or ray"
        )
    return replace(
        config.args,
        model=str(config.facts.files.path.absolute()),
        revision=None,
        download_dir=None,
        hf_token=None,
        generation_config="vllm",  # request defaults are resolved in this process
    )


def as_started(config: Config, ready: ipc.Ready) -> Config:
    """Return the configuration with what the engine process decided."""
    return replace(
        config,
        device=ready.device,
        dtype=ready.dtype,
        max_batched_tokens=ready.max_batched_tokens,
        max_seqs=ready.max_seqs,
        depth=ready.depth,
        page_size=ready.page_size,
        device_facts=replace(config.device_facts, name=ready.device_name),
    )


def _last(name: str, reason: FinishReason, why: str | None) -> TokenDelta:
    return TokenDelta(name, [], reason, error=why)
