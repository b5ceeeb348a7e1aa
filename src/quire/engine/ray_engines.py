"""Engines that Ray starts: `data_parallel_backend=ray`.

    this process    the server; machine 0 of the engines (`node_listener.py`)
    an actor        for each engine: runs it on its node and connects it to this process (`node_agent.py`)

Each engine has a placement group, or its own bundles of the placement group of this Ray actor or task. A bundle has the CPUs or
GPUs of all ranks, which run on one node; with distributed_executor_backend=ray there is a bundle for each rank, and the engine
starts the ranks of other nodes (`executor/ray_nodes.py`). A lost engine is restarted by its actor, a lost actor when the router
asks for its engine again: Ray moves the bundles of a lost node to another one.
"""

import contextlib
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.args import EngineArgs
from quire.config.devices import RAY_BUNDLES, SHARE
from quire.engine.executor.ray_gpus import PART, handle_of, read_part
from quire.engine.executor.ray_nodes import (
    NODE_ADDRESS,
    RESERVE_S,
    Unit,
    Wait,
    connect_cluster,
    current_group,
    export_group,
    group_entry,
    import_ray,
    make_actor,
    placement_groups,
)
from quire.engine.handshake import Address, terms_of
from quire.engine.node_agent import NodeAgent
from quire.engine.node_listener import NodeListener, WaitingNode
from quire.proc.logs import set_up_child
from quire.types.errors import ConfigError, EngineError, QuireError

WAIT_SHARE = 0.9  # of engine_start_timeout: what is missing is reported before the engine counts as late
MAX_LOSSES = 3  # of an engine's actors in a row, before one connects
LOCAL = "127.0.0.1"  # the default of data_parallel_address: here the address of this Ray node
DEFAULT_PORT = EngineArgs("").data_parallel_rpc_port  # here: any free port
THREADS = "OMP_NUM_THREADS"
PASSED_ON, NOT_PASSED_ON = ("QUIRE_", "VLLM_"), "QUIRE_RAY_"  # environment of engines: prefixes of this process's variables
SECRETS = ("_API_KEY",)  # ends of names: Ray shows arguments of actors to everyone in the cluster, and engines need none

logger = logging.getLogger(__name__)


class _Agent:
    """The actor of an engine."""

    def run(
        self, args: EngineArgs, engine: int, index: int, here: int, key: str, bundles: Sequence[int], variables: dict[str, str]
    ) -> None:
        """Run an engine until machine 0 has ended it.

        index: of the engine among the `here` engines that share this node.
        bundles: of its placement group.
        variables: of its environment.
        """
        ray: Any = import_ray()
        set_up_child(logging.Formatter("%(levelname)s %(name)s: %(message)s"), logging.INFO)
        os.environ.pop(THREADS, None)  # set by Ray
        os.environ.update(variables)
        os.environ[RAY_BUNDLES] = ",".join(map(str, bundles))
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        export_group()
        NodeAgent(args, engine, 1, key, index, here).run()


@dataclass(frozen=True)
class _Place:
    """Where an engine runs."""

    group: Any  # placement group
    name: str  # of the group, in hexadecimal
    bundles: Sequence[int]  # the actor is in the first one


@dataclass(frozen=True)
class _Run:
    """An actor that runs an engine."""

    actor: Any
    result: Any  # available when it has ended


class RayEngines:
    """The actors of all engines. Each is started when its engine is waited for."""

    def __init__(self, args: EngineArgs) -> None:
        self._ray = import_ray()
        self._group = current_group(self._ray)  # that of this thread: others do not have it
        self._args, self._terms, self._key = args, terms_of(args), secrets.token_hex(16)
        world = args.tensor_parallel_size * args.pipeline_parallel_size
        self._bundles = world if args.distributed_executor_backend == "ray" else 1  # of an engine
        self._ranks, self._unit = world // self._bundles, Unit()  # of a bundle; of a rank
        self._connecting = threading.Lock()  # may be held for long
        self._lock, self._closed = threading.Lock(), False
        self._listener: NodeListener | None = None
        self._places: list[_Place] = []  # by engine
        self._reserved: list[Any] = []  # placement groups that were made here
        self._runs: dict[int, _Run] = {}
        self._lost: Counter[int] = Counter()  # actors that were lost before they connected, by engine

    # ---- for the router --------------------------------------------------------------------------------------------------

    def wait(self, engine: int, over: threading.Event) -> WaitingNode | None:
        """Wait until the actor of an engine has connected. None: `over` was set. Raises QuireError if it will not."""
        try:
            return self._wait(engine, over)
        except QuireError:
            raise
        except Exception as error:  # of Ray: its cluster may be gone
            raise EngineError(f"engine {engine} cannot be started on Ray: {type(error).__name__}: {error}") from error

    def _wait(self, engine: int, over: threading.Event) -> WaitingNode | None:
        wait = Wait(WAIT_SHARE * self._args.engine_start_timeout, RESERVE_S)
        self._lost[engine] = -1 if engine in self._runs else 0  # the actor that connected before may be lost
        while not over.is_set():
            with self._connecting:
                listener = self._listener or self._connect()
            with self._lock:
                if self._closed:
                    listener.close()
                    return None
                missing = self._start(engine)
            if missing:
                wait.pause(missing)
            elif (arrived := listener.take(engine)) is not None:
                return arrived
        return None

    def absence(self, engine: int) -> str:
        return f"the Ray actor of engine {engine} did not connect. Look for the reason in Ray's logs of its node"

    def close(self) -> None:
        """End the actors, and with them the engines; remove the placement groups."""
        with self._lock:
            self._closed = True
            for run in self._runs.values():
                self._end(run)
            self._release()
            if self._listener is not None:
                self._listener.close()

    # ---- actors ----------------------------------------------------------------------------------------------------------

    def _start(self, engine: int) -> str:
        """Start the actor of an engine unless it runs. Return what the cluster does not have yet."""
        if not self._places and (missing := self._reserve()):
            return missing
        if (run := self._runs.get(engine)) is not None:
            if not self._has_ended(engine, run):
                return ""
            self._end(self._runs.pop(engine))
        states = [group_entry(place.name)["state"] for place in self._places]
        waits = [number for number, state in enumerate(states) if state != "CREATED"]
        if engine in waits or (waits and not self._runs):  # the first starts know which engines share their node
            return self._describe(waits)
        self._runs[engine] = self._run_agent(engine)
        return ""

    def _connect(self) -> NodeListener:
        """Connect to the Ray cluster, and listen for its actors."""
        args = self._args
        ray = connect_cluster(args.data_parallel_size * self._bundles * self._ranks)
        if args.device in ("auto", "cuda"):
            self._unit = _gpu_unit(ray, args, self._group)
        here = ray.get_runtime_context().get_node_id()
        [address] = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here]
        host = address if args.data_parallel_address == LOCAL else args.data_parallel_address
        port = 0 if args.data_parallel_rpc_port == DEFAULT_PORT else args.data_parallel_rpc_port
        self._listener = NodeListener((host, port), range(args.data_parallel_size), self._terms, self._key)
        return self._listener

    def _end(self, run: _Run) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.kill(run.actor)

    def _run_agent(self, engine: int) -> _Run:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._listener is not None
        place, gpus = self._places[engine], self._unit.amount * self._ranks if self._unit.resource == "GPU" else 0
        nodes = [self._node_of(other) for other in self._places]
        sharing = [number for number, node in enumerate(nodes) if node == nodes[engine]]
        index, here = (0, 1) if gpus else (sharing.index(engine), len(sharing))  # Ray shows each actor its GPUs only
        strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.bundles[0])
        actor = make_actor(self._ray, _Agent, num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy)
        args, variables = _addressed(self._args, self._listener.address), passed_on(os.environ)
        if 0 < gpus < self._ranks:
            variables[SHARE] = "1"
        logger.info("engine %d starts on Ray node %s", engine, nodes[engine])
        return _Run(actor, actor.run.remote(args, engine, index, here, self._key, list(place.bundles), variables))

    def _node_of(self, place: _Place) -> str:
        """Return the id of the node of an engine; "" while Ray looks for one."""
        return str(group_entry(place.name)["bundles_to_node_id"].get(place.bundles[0]) or "")

    def _has_ended(self, engine: int, run: _Run) -> bool:
        """Return whether an actor was lost. Raises EngineError with its own error, or if it was the last of several."""
        ray = self._ray
        ended, _ = ray.wait([run.result], timeout=0)
        if not ended:
            return False
        reason = "it ended"
        try:
            ray.get(run.result)
        except ray.exceptions.RayTaskError as error:  # of our code
            del self._runs[engine]
            raise EngineError(f"engine {engine} failed on Ray: {error.cause}") from None
        except ray.exceptions.RayError as error:
            reason = type(error).__name__
        self._lost[engine] += 1
        if self._lost[engine] >= MAX_LOSSES:
            del self._runs[engine]
            raise EngineError(
                f"engine {engine} was lost on Ray {MAX_LOSSES} times before it connected: {reason}. Look for the reason in "
                "Ray's logs of its node"
            )
        logger.warning("the Ray actor of engine %d was lost: %s", engine, reason)
        return True

    # ---- placement -------------------------------------------------------------------------------------------------------

    def _reserve(self) -> str:
        """Find a place for every engine. Return what a cluster that may grow again does not have.

        Raises ConfigError if the cluster or the placement group of this process never has enough.
        """
        if (group := self._group) is not None:
            self._places = [_Place(handle_of(group), group, bundles) for bundles in self._divide(group)]
            return ""
        known = self._ray.nodes()
        alive = [node for node in known if node["Alive"]]
        try:
            self._check_room(alive)
        except ConfigError as error:
            if len(alive) == len(known):
                raise
            return str(error)  # a lost node may come back
        here = self._ray.get_runtime_context().get_node_id()
        local, bundle = self._args.data_parallel_size_local, {self._unit.resource: self._unit.amount * self._ranks}
        for engine in range(self._args.data_parallel_size):
            where = {} if local is None else {"ray.io/node-id": here if engine < local else f"!{here}"}
            labels = {"bundle_label_selector": [where] * self._bundles} if where else {}
            made = placement_groups().placement_group([bundle] * self._bundles, strategy="PACK", **labels)
            self._reserved.append(made)
            self._places.append(_Place(made, made.id.hex(), range(self._bundles)))
        return ""

    def _divide(self, group: str) -> list[list[int]]:
        """Return the bundles of every engine, of a placement group of the user."""
        entry, size = group_entry(group), self._unit.amount * self._ranks
        nodes = entry["bundles_to_node_id"]
        fit = [index for index, bundle in entry["bundles"].items() if bundle.get(self._unit.resource, 0) >= size - 1e-6]
        sizes = Counter(nodes.get(index) for index in fit)
        fit.sort(key=lambda index: (-sizes[nodes.get(index)], str(nodes.get(index)), index))  # few nodes per engine
        if self._args.data_parallel_size_local is not None:
            raise ConfigError(
                f"data_parallel_size_local={self._args.data_parallel_size_local} is not supported in the Ray placement group "
                f"{group}, whose bundles say where engines run; leave it out"
            )
        if len(fit) < self._args.data_parallel_size * self._bundles:
            raise ConfigError(
                f"{self._needs()}; of the {len(nodes)} bundles of the Ray placement group {group}, {len(fit)} have that. "
                f"Add bundles, or lower data_parallel_size{self._remedy()}"
            )
        return [fit[self._bundles * engine :][: self._bundles] for engine in range(self._args.data_parallel_size)]

    def _check_room(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if the nodes cannot have all engines, even without other jobs."""
        unit, here = self._unit, self._ray.get_runtime_context().get_node_id()
        bundle = Unit(unit.resource, unit.amount * self._ranks)
        there = {node["NodeID"]: node["Resources"].get(unit.resource, 0) for node in nodes}
        room = {node: bundle.room(amount) for node, amount in there.items()}
        total, local = self._args.data_parallel_size, self._args.data_parallel_size_local
        sizes = ", ".join(f"{amount:g}" for amount in there.values())
        if sum(room.values()) < total * self._bundles:
            raise ConfigError(
                f"{self._needs()}; the nodes of the Ray cluster have {sizes} {unit.resource}s. Start more nodes, or lower "
                f"data_parallel_size{self._remedy()}"
            )
        if local is None:
            return
        own = room.pop(here, 0)
        if own < local * self._bundles or sum(room.values()) < (total - local) * self._bundles:
            raise ConfigError(
                f"{self._needs()}; data_parallel_size_local={local} of them must be on this Ray node, which has "
                f"{there[here]:g} of the {sizes} {unit.resource}s of the cluster. Leave data_parallel_size_local out"
            )

    def _needs(self) -> str:
        """Return what all engines need, for an error."""
        amount, resource = self._unit.amount * self._ranks, self._unit.resource
        size = f"{amount:g} {resource}" if amount == 1 else f"{amount:g} {resource}s"
        each = f"{size} on one node" if self._bundles == 1 else f"{self._bundles} times {size}"
        return f"data_parallel_size={self._args.data_parallel_size} requires {each} for each engine"

    def _remedy(self) -> str:
        return "" if self._ranks == 1 else ", or set distributed_executor_backend=ray: an engine may then use several nodes"

    def _describe(self, engines: Sequence[int]) -> str:
        """Return what engines wait for."""
        name = self._unit.resource
        free = self._ray.available_resources().get(name, 0)
        numbers = ", ".join(map(str, engines))
        return f"{self._needs()}; engines without a place: {numbers}; {free:g} {name}s are free, others hold the rest"

    def _release(self) -> None:
        while self._reserved:
            with contextlib.suppress(Exception):  # the cluster may be gone
                placement_groups().remove_placement_group(self._reserved.pop())


def _gpu_unit(ray: Any, args: EngineArgs, group: str | None) -> Unit:
    """Return what a rank needs: a GPU, or a part of one; a CPU with device "auto" where there are no GPUs."""
    bundles = [node["Resources"] for node in ray.nodes()] if group is None else group_entry(group)["bundles"].values()
    if not any(bundle.get("GPU") for bundle in bundles):
        if args.device == "auto":
            return Unit()
        raise ConfigError("engines on GPUs require GPUs of the Ray cluster. Start its nodes with --num-gpus, or use device=cpu")
    amount = read_part(os.environ.get(PART) or "1")
    if amount < 1 and args.kv_cache_memory_bytes is None:
        raise ConfigError(f"{PART}={amount:g} lets engines share a GPU, which requires kv_cache_memory_bytes; give it")
    return Unit("GPU", amount)


def _addressed(args: EngineArgs, address: Address) -> EngineArgs:
    return replace(args, data_parallel_address=address[0], data_parallel_rpc_port=address[1])


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that engines get: Ray starts actors with the environment of their node."""
    return {
        name: value
        for name, value in environ.items()
        if name == THREADS or (name.startswith(PASSED_ON) and not name.startswith(NOT_PASSED_ON) and not name.endswith(SECRETS))
    }
