"""Several engines as one: what `EngineClient` is to one engine process, this is to N of them.

    add ─► Balancer ─┬─► EngineClient 0 ═ engine process
                     ├─► EngineClient 1 ═ engine process        each with its own supervisor
                     └─► ...                         deltas ─► listener, as they arrive

A request that has begun stays with its engine. A lost engine is restarted by its supervisor and gets its requests again.
Requests that it had not begun move to other engines when these have free slots. New requests go to ready engines, if there are
any. The requests of an engine that is given up continue in the others. The router is dead when all engines are.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from quire.config.args import EngineArgs, local_engines
from quire.config.config import Config
from quire.engine import ipc
from quire.engine.child import COMMAND, engine_fork_server
from quire.engine.client import EngineClient, OpenRequest, check_number, engine_args
from quire.engine.handle import EngineGroup, EngineHandle, EngineListener
from quire.engine.handshake import terms_of
from quire.engine.node_listener import EngineNodes, NodeListener
from quire.features.experts.peers import expert_peers_of
from quire.proc.fork_server import LazyForkServer
from quire.sched.balancer import Balancer
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import ExpertPeerLost, QuireError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest

CAUSE_TIMEOUT_S = 5.0  # for the cause of a loss to be reported


class EngineRouter(EngineGroup):
    """Several engines."""

    def __init__(
        self,
        args: EngineArgs,
        listener: EngineListener,
        command: Sequence[str] = COMMAND,
        serving: bool = True,
        fork_server: LazyForkServer | None = None,
    ) -> None:
        """Start the engines. serving, fork_server: see `EngineClient`."""
        self._balancer, self._listener = Balancer(args.data_parallel_size), listener
        self._caching = args.enable_prefix_caching
        self.engines: list[EngineClient] = []
        fork_server = fork_server or engine_fork_server()  # shared by all
        self._expert_peers = expert_peers_of(args)
        here = local_engines(args)
        self._nodes = None if here == args.data_parallel_size else find_nodes(args, range(here, args.data_parallel_size))
        try:
            for number in range(args.data_parallel_size):
                nodes = self._nodes if number >= here else None
                client = EngineClient(args, self, command, number, serving, fork_server, nodes, self._expert_peers)
                self.engines.append(client)
                self.engines[-1].heir = self._inherit
                self.engines[-1].relief = self._relieve
                if self._expert_peers is not None:
                    self.engines[-1].on_given_up = self._give_up
        except BaseException:
            self.stop(0.0)
            raise

    # ---- state -----------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return sum(engine.num_open for engine in self.engines)

    async def wait_ready(self) -> None:
        """Wait for all engines. Raises why one of them could not start."""
        waiting = [asyncio.ensure_future(self._wait(number)) for number in range(len(self.engines))]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()

    async def _wait(self, number: int) -> None:
        try:
            await self.engines[number].wait_ready()
        except QuireError as found:
            number, error = await self._cause(number, found)
            message = str(error)
            raise type(error)(message if message.startswith("engine ") else f"engine {number}: {message}") from error

    async def _cause(self, number: int, error: QuireError) -> tuple[int, QuireError]:
        """Return the engine and error that caused a failed start: engines that share experts fail together."""
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while isinstance(error, ExpertPeerLost) and time.monotonic() < deadline:
            for other, engine in enumerate(self.engines):
                other_error = engine.supervisor.error
                if other_error is not None and not isinstance(other_error, ExpertPeerLost):
                    return other, other_error
            await asyncio.sleep(0.02)
        return number, error

    async def run(self) -> None:
        """Receive reports until all engines are dead."""
        await asyncio.gather(*(engine.run() for engine in self.engines))

    # ---- commands --------------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        self.check()
        shares: dict[int, list[EngineRequest]] = {}
        takers = self._takers()
        for request in requests:
            wish = request.engine
            among = takers if wish is None or self.engines[wish].state == "dead" else [wish]
            shares.setdefault(self._balancer.place(request, among), []).append(request)
        try:
            for number, share in shares.items():
                self.engines[number].add(share)
        except BaseException:
            self.abort([request.id for share in shares.values() for request in share])
            raise

    def abort(self, ids: Iterable[str]) -> None:
        """End requests: nothing more is reported of them. Unknown ids are ignored."""
        shares: dict[int, list[str]] = {}
        for name in ids:
            number = self._balancer.engine(name)
            if number is not None:
                self._balancer.end(name)
                shares.setdefault(number, []).append(name)
        for number, share in shares.items():
            self.engines[number].abort(share)

    def watch(self, watched: bool) -> None:
        for engine in self.engines:
            engine.watch(watched)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of every engine core. Return whether all returned True, all lists as one, or the first result."""
        self.check()
        if method == "reset_prefix_cache":
            self._balancer.forget_pages()
        if method == "release":
            self._balancer.release(args[0])
        answers = await asyncio.gather(*(engine.call(method, *args) for engine in self.engines if engine.state != "dead"))
        if all(isinstance(answer, list) for answer in answers):
            return [each for answer in answers for each in answer]
        return all(answers) if all(isinstance(answer, bool) for answer in answers) else answers[0]

    def check(self, engine: int | None = None) -> None:
        """Raise EngineDead if no engine is left, or not this one; InvalidParameter if its number is out of range."""
        check_number(engine, len(self.engines))
        if self.state == "dead":
            self.engines[0].check()
        if engine is not None:
            self.engines[engine].check()

    def stop(self, timeout: float) -> None:
        """End all engines. Open requests end with `abort`."""
        if timeout > 0:
            for engine in self.engines:
                if engine.state == "ready":
                    engine.supervisor.send(ipc.Stop())  # all at the same time
        for engine in self.engines:
            engine.supervisor.stop(timeout)  # all of them before the fork server, which ends its forks
        for engine in self.engines:
            engine.stop(0.0)
        if self._nodes is not None:
            self._nodes.close()
        if self._expert_peers is not None:
            self._expert_peers.close()

    # ---- what engines report ---------------------------------------------------------------------------------------------

    def on_ready(self, ready: ipc.Ready, engine: int = 0) -> None:
        self._balancer.begin(engine, ready.pages, ready.page_size, ready.max_seqs, self._caching)
        self._listener.on_ready(ready, engine)

    def on_deltas(self, deltas: Sequence[TokenDelta], engine: int = 0) -> None:
        for delta in deltas:
            if delta.finish_reason is None:
                self._balancer.add_tokens(delta.request_id, len(delta.token_ids))
            else:
                self._balancer.end(delta.request_id)
        self._listener.on_deltas(deltas, engine)
        if any(delta.finish_reason is not None for delta in deltas):
            self._relieve_all()

    def on_step(self, report: ipc.StepReport, engine: int = 0) -> None:
        self._listener.on_step(report, engine)

    def on_snapshot(self, snapshot: EngineSnapshot, engine: int = 0) -> None:
        self._listener.on_snapshot(snapshot, engine)

    def on_refused(self, engine_id: str, error: QuireError) -> None:
        self._balancer.end(engine_id)
        self._listener.on_refused(engine_id, error)

    # ---- requests of lost engines ----------------------------------------------------------------------------------------

    def _inherit(self, orphans: list[OpenRequest]) -> list[OpenRequest]:
        """Move requests of an engine that is given up to the others. A request that named that engine runs elsewhere."""
        takers = self._takers()
        if not takers:
            return orphans
        shares: dict[int, list[OpenRequest]] = {}
        for orphan in orphans:
            self._balancer.end(orphan.spec.id)
        for orphan in orphans:
            number = self._balancer.place(orphan.spec, takers)
            self._balancer.add_tokens(orphan.spec.id, len(orphan.tokens))
            shares.setdefault(number, []).append(orphan)
        for number, share in shares.items():
            self.engines[number].adopt(share)
        return []

    def _relieve_all(self) -> None:
        for engine in self.engines:
            engine.relieve()

    def _relieve(self, not_begun: list[OpenRequest]) -> list[OpenRequest]:
        """Move requests that a lost engine had not begun to free slots of ready engines; return those that moved.

        Forks and requests that others may fork stay with their engine, and so do requests that name it.
        """
        ready = [number for number, engine in enumerate(self.engines) if engine.state == "ready"]
        shares: dict[int, list[OpenRequest]] = {}
        parents = {entry.spec.fork_of for entry in not_begun}
        for entry in not_begun:
            spec = entry.spec
            bound = spec.engine is not None or spec.fork_of is not None or spec.hold or spec.id in parents
            number = None if bound else self._balancer.move(spec, ready)
            if number is not None:
                shares.setdefault(number, []).append(entry)
        for number, share in shares.items():
            self.engines[number].adopt(share)
        return [entry for share in shares.values() for entry in share]

    def _give_up(self, error: QuireError) -> None:
        """End all engines that share experts: none can continue without the others."""
        for engine in self.engines:
            if engine.state != "dead":
                engine.supervisor.doom(error)

    def _takers(self) -> list[int]:
        """Return the engines that may get requests: ready ones, or else those that will be ready."""
        states = [engine.state for engine in self.engines]
        ready = [number for number, state in enumerate(states) if state == "ready"]
        return ready or [number for number, state in enumerate(states) if state != "dead"]


def find_nodes(args: EngineArgs, engines: range) -> EngineNodes:
    """Return the nodes of engines that are not on this machine, or that Ray places."""
    if args.data_parallel_backend == "ray":
        from quire.engine.ray_engines import RayEngines

        return RayEngines(args)
    return NodeListener((args.data_parallel_address, args.data_parallel_rpc_port), engines, terms_of(args))


def start_engines(
    config: Config,
    listener: EngineListener,
    command: Sequence[str] = COMMAND,
    fork_server: LazyForkServer | None = None,
) -> EngineHandle:
    """Start one engine or several. fork_server: see `EngineClient`."""
    args = engine_args(config)
    if args.data_parallel_size > 1:
        return EngineRouter(args, listener, command, fork_server=fork_server)
    return EngineClient(args, listener, command, fork_server=fork_server)
