"""The engine as the API process sees it: requests go in, deltas come out, and a lost engine is only a pause.

For every open request the client keeps the request and the tokens told so far. When an engine was lost, the next one gets them
all again, and each goes on where its tokens end: random numbers, penalties and limits depend on positions alone.

A request that makes engines crash must not take the others with it for ever. Who was worked on at two crashes in a row without
any progress is a suspect; suspects are sent last and one at a time, the next when the one before has made progress. Whoever it
happens to MOST_STRIKES times ends with an error.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.engine import ipc
from quire.engine.child import COMMAND, Child, engine_fork_server
from quire.engine.handle import EngineListener, EngineStatus, EngineView
from quire.engine.node_listener import NodeListener, RemoteEngine
from quire.engine.supervisor import AnyChild, Supervisor, SupervisorLimits
from quire.features.experts.peers import ExpertPeers
from quire.proc.fork_server import LazyForkServer
from quire.types.adapter import AdapterRef
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import ConfigError, EngineDead, EngineError, InvalidParameter, QuireError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest, FinishReason
from quire.types.stats import Stats

SUSPECT, MOST_STRIKES = 2, 3
WARM_AFTER = 3.0  # seconds after an engine is ready, in which the first requests have the machine to themselves
AT_ONCE = 1 << 16  # tokens of requests in one message to the engine


@dataclass(eq=False)
class OpenRequest:
    """A request that is not finished."""

    spec: EngineRequest
    tokens: list[int] = field(default_factory=list)
    scored: int = 0  # prompt positions whose logprobs came
    strikes: int = 0  # crashes in a row at which it was worked on, without progress since the one before
    sent_with: int = -1  # what `told` was when the present engine got it; -1: it has not got it

    @property
    def told(self) -> int:
        return len(self.tokens) + self.scored

    @property
    def progressed(self) -> bool:
        return self.told > self.sent_with

    def again(self) -> EngineRequest:
        self.sent_with = self.told
        return replace(self.spec, resumed=tuple(self.tokens), scored=self.scored) if self.told else self.spec


@dataclass(eq=False, slots=True)
class OpenCall:
    """What an engine is asked to do, the next one if this one is lost."""

    command: ipc.CallMethod | ipc.LoadAdapter
    future: asyncio.Future[Any]
    strikes: int = 0
    sent: bool = False


class EngineClient(EngineView):
    """`spare` is a process that waits for its arguments: it becomes the first engine. `engine`: its number, of several;
    `serving`: requests come and go while others wait for their next token."""

    def __init__(
        self,
        args: EngineArgs,
        listener: EngineListener,
        command: Sequence[str] = COMMAND,
        spare: Child | None = None,
        engine: int = 0,
        serving: bool = True,
        warm: LazyForkServer | None = None,
        node_listener: NodeListener | None = None,
        companions: ExpertPeers | None = None,
    ) -> None:
        """Start an engine.

        warm: the fork server of restarts; by default the client has its own, if warm_restart asks for it.
        node_listener: the engine is on another node, which connects there.
        companions: engines that share its experts.
        """
        if args.distributed_executor_backend == "ray":
            from quire.engine.executor.ray_nodes import export_group

            export_group()
        self._listener, self._node_listener, self._number = listener, node_listener, engine
        self._warm = warm or engine_fork_server()
        self._warms = bool(args.warm_restart) and args.distributed_executor_backend != "fake" and tuple(command) == COMMAND
        self._open: dict[str, OpenRequest] = {}
        self._suspects: deque[OpenRequest] = deque()
        self._probe: OpenRequest | None = None  # the suspect whose progress is awaited
        self._calls: dict[int, OpenCall] = {}
        self._numbers = itertools.count()
        self._outbox: deque[OpenRequest] = deque()  # to be sent
        self._sending = False  # the rest of them has its turn soon
        self._sent_now: list[OpenRequest] = []  # with the latest message
        self.replayed_requests = 0  # requests that another engine had before
        self._watched = False
        self.heir: Callable[[list[OpenRequest]], list[OpenRequest]] = lambda orphans: orphans  # see `on_dead`
        self.relief: Callable[[list[OpenRequest]], list[OpenRequest]] = lambda _: []  # returns those taken
        self.on_given_up: Callable[[QuireError], None] = lambda error: None  # noqa: ARG005
        self.stats: Stats | None = None  # as of the latest step
        self.pages = 0  # of the cache; 0 until an engine is ready
        spares = [] if spare is None else [spare]

        def start() -> AnyChild:
            if node_listener is not None:
                return RemoteEngine(args, node_listener, engine, serving)
            if companions is not None:
                ends = companions.take(engine)
                try:
                    return Child(args, command, engine, serving, self._warm.get(), ends)
                finally:
                    ends.close()
            if not spares:
                return Child(args, command, engine, serving, self._warm.get())
            child = spares.pop()
            child.begin(args, engine, serving)
            return child

        name = "the engine" if args.data_parallel_size == 1 else f"engine {engine}"
        self.supervisor = Supervisor(start, SupervisorLimits.of(args), self, name)

    # ---- how it is -------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> "list[EngineClient]":
        """Of a router there are several."""
        return [self]

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def status(self) -> EngineStatus:
        one = self.supervisor
        error = None if one.error is None else str(one.error)
        return EngineStatus(
            one.state, one.heard_at, one.busy_for, one.restarts, self.replayed_requests, one.last_loss, one.pid,
            self.pages, self.stats, error,
        )  # fmt: skip

    async def wait_ready(self) -> None:
        """Raises why the engine could not start."""
        await self.supervisor.wait_ready()

    async def run(self) -> None:
        """Listens to the engine until it is dead. May be cancelled and run again, on another event loop too."""
        await self.supervisor.run()

    # ---- asking ----------------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """What cannot be sent now is sent when an engine is ready."""
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
        """No more is heard of these requests. Unknown ids are ignored."""
        gone = [entry for name in ids if (entry := self._open.pop(name, None)) is not None]
        sent = [entry.spec.id for entry in gone if entry.sent_with >= 0]
        if sent and self.supervisor.state == "ready":
            self.supervisor.send(ipc.Abort(sent))
        self._go_on()

    def watch(self, watched: bool) -> None:
        """Engines tell what they see, the present one and those after it, or they stop collecting it."""
        self._watched = watched
        if self.supervisor.state == "ready":
            self.supervisor.send(ipc.Watch(watched))

    async def call(self, method: str, *args: Any) -> Any:
        """A method of the engine core; waits for an engine if there is none now."""
        return await self._answer(ipc.CallMethod(next(self._numbers), method, list(args)))

    async def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:
        """Returns when the engine has read it; raises why it cannot."""
        await self._answer(ipc.LoadAdapter(next(self._numbers), ref, pinned))

    def tell(self, method: str, *args: Any) -> None:
        """As `call`, without waiting; nothing happens if there is no engine now."""
        if self.supervisor.state == "ready":
            self.supervisor.send(ipc.CallMethod(next(self._numbers), method, list(args)))

    def pin_again(self, ref: AdapterRef) -> None:
        """What an engine before this one had pinned."""
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
        """Raises EngineDead if there is no engine and never will be, InvalidParameter if there is none of this number."""
        check_number(engine, 1)
        if self.supervisor.state == "dead":
            raise EngineDead(str(self.supervisor.error))

    def stop(self, timeout: float) -> None:
        """Ends the engine. Open requests end with `abort`."""
        self.supervisor.stop(timeout)
        self._warm.close()
        self._end_all("abort", None, EngineDead("the engine was shut down"))

    # ---- hearing (called by the supervisor) ------------------------------------------------------------------------------

    def on_ready(self, ready: ipc.Ready) -> None:
        self.pages = ready.pages
        if self._warms:
            asyncio.get_running_loop().call_later(WARM_AFTER, self._prepare)
        self._listener.on_ready(ready, self._number)
        if self._watched:
            self.supervisor.send(ipc.Watch(True))
        waiting = sorted(self._open.values(), key=lambda entry: entry.strikes)
        self._suspects = deque(entry for entry in waiting if entry.strikes >= SUSPECT)
        self._send([entry for entry in self._open.values() if entry.strikes < SUSPECT])
        for call in self._calls.values():
            self._ask(call)
        if len(self._suspects) == len(self._open):
            self._go_on()

    def _prepare(self) -> None:
        if self.supervisor.state != "dead":
            self._warm.prepare()

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
                if entry is not None and entry.told and not answer.added:  # a smaller engine than the one that took it
                    self._listener.on_deltas(
                        [_last(name, "error", f"it could not go on after a restart: {answer.message}")], self._number
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
        guilty = [name for name, entry in self._open.items() if entry.strikes >= MOST_STRIKES]
        for name in guilty:
            del self._open[name]
        if guilty:
            why = f"the engine was lost {MOST_STRIKES} times in a row while it worked on this request"
            self._listener.on_deltas([_last(name, "error", why) for name in guilty], self._number)
        for call in self._calls.values():
            call.strikes, call.sent = call.strikes + call.sent, False
            if call.strikes >= MOST_STRIKES and not call.future.done():
                call.future.set_exception(EngineDead(f"the engine was lost {MOST_STRIKES} times in a row while it did this"))
        if self._node_listener is not None and self._open:  # nobody knows when its node comes again, if it does
            left = self.heir(list(self._open.values()))
            self._open = {entry.spec.id: entry for entry in left}
        self.relieve()

    def relieve(self) -> None:
        """While the engine restarts, let other engines take requests that it had not begun."""
        if self.supervisor.state not in ("ready", "dead"):
            not_begun = [entry for entry in self._open.values() if not entry.told and not entry.strikes]
            for entry in self.relief(not_begun):
                del self._open[entry.spec.id]

    def on_dead(self, error: QuireError) -> None:
        """The engine is given up. Whoever inherits its requests returns those that nobody can have: they end."""
        orphans = list(self._open.values())
        left = self.heir(orphans) if orphans else []
        self._open = {entry.spec.id: entry for entry in left}
        self._end_all("error", str(error), error)
        self.on_given_up(error)

    def adopt(self, entries: Iterable[OpenRequest]) -> None:
        """Requests that another engine had begun go on in this one, from their token logs."""
        for entry in entries:
            entry.sent_with = -1
            self._open[entry.spec.id] = entry
            if entry.strikes >= SUSPECT:
                self._suspects.append(entry)
        if self.supervisor.state == "ready":
            self._send([entry for entry in self._open.values() if entry.sent_with < 0 and entry.strikes < SUSPECT])
            self._go_on()

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _ask(self, call: OpenCall) -> None:
        call.sent = True
        self.supervisor.send(call.command)

    def _send(self, entries: Sequence[OpenRequest]) -> None:
        """So much at a time that others have their turn in between."""
        self._outbox.extend(entries)
        if not self._sending:
            self._send_some()

    def _send_some(self) -> None:
        self._sending = False
        if self.supervisor.state != "ready":
            self._outbox.clear()  # all that is open will be sent to the next engine
            return
        batch: list[OpenRequest] = []
        prompts, tokens = set[int](), 0
        while self._outbox and tokens < AT_ONCE:
            entry = self._outbox.popleft()
            if self._open.get(entry.spec.id) is not entry or entry.sent_with >= 0:
                continue
            tokens += len(entry.tokens) + (0 if id(entry.spec.prompt) in prompts else len(entry.spec.prompt))
            prompts.add(id(entry.spec.prompt))
            batch.append(entry)
        if self._outbox:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_more)
        self._sent_now = batch
        if batch:
            self.replayed_requests += sum(1 for entry in batch if entry.told or entry.strikes)
            self.supervisor.send(ipc.add([entry.again() for entry in batch]))

    def _send_more(self) -> None:
        """Nobody waits for this to return: what cannot be sent is told as a refusal."""
        try:
            self._send_some()
        except Exception as error:
            refusal = error if isinstance(error, QuireError) else EngineError(f"{type(error).__name__}: {error}")
            for entry in self._sent_now:
                if self._open.pop(entry.spec.id, None) is not None:
                    self._listener.on_refused(entry.spec.id, refusal)

    def _go_on(self) -> None:
        """The next suspect may be sent when the one before has made progress or is gone."""
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
    """Can a request wish for this engine?"""
    if engine is not None and not 0 <= engine < engines:
        there = "there is one engine, 0" if engines == 1 else f"there are {engines} engines, 0 to {engines - 1}"
        raise InvalidParameter(f"data_parallel_rank {engine} is out of range: {there}", "data_parallel_rank")


def engine_args(config: Config) -> EngineArgs:
    """What engine processes are told. The files are found by now: neither a start nor a restart asks the hub again."""
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
        generation_config="vllm",  # defaults of requests are resolved here
    )


def as_started(config: Config, ready: ipc.Ready) -> Config:
    """With what was decided in the engine process."""
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
