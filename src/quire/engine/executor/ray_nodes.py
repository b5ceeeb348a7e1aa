"""Ray as the launcher of ranks on other nodes: an existing cluster, or one on this machine.

    this node     the engine, and the first ranks (`workers.py`)
    other nodes   an actor each, which starts the node's ranks and watches them (`nodes.run_node`)

A placement group reserves a CPU for every rank. Inside a Ray actor or task that has a placement group, ranks use its bundles.
A cluster that has lost a node gets time to replace it: a start waits for nodes until `engine_start_timeout`. Ranks on GPUs
reserve them before the device is queried (`ray_gpus.py`).

Data goes over our own connections; Ray only starts and ends actors, and ends them with the engine. `ray` is an extra:
pip install 'quire[ray]'.
"""

import atexit
import contextlib
import importlib
import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.config.args import EngineArgs, connect_timeout
from quire.config.devices import RAY_BUNDLES
from quire.engine import handshake
from quire.engine.executor import nodes
from quire.engine.executor.nodes import share_ranks
from quire.engine.handshake import own_terms, terms_of
from quire.proc.spawn import environment
from quire.progress import doing
from quire.types.errors import ConfigError, EngineError

GROUP = "QUIRE_RAY_PLACEMENT_GROUP"  # the id, in hexadecimal, of the group of the Ray actor that started this process
GPUS = "QUIRE_RAY_GPUS"  # the GPUs that Ray gave to that actor, with commas
PAUSE_S = 0.5  # between two checks of the cluster
RESERVE_S = 3  # for the cluster to reserve CPUs that are free
LOG_EVERY_S = 10.0
CONNECT_TIMEOUT_S = 10.0  # to the head of the cluster
RayNode = dict[str, Any]  # an entry of ray.nodes()
logger = logging.getLogger(__name__)
NODE_ADDRESS = "QUIRE_RAY_NODE_IP"  # of this process's Ray node
LOCAL_CPUS = "QUIRE_RAY_CPUS"  # of a cluster that is started here; default: the number of ranks


@dataclass(frozen=True)
class Unit:
    """What a rank needs."""

    resource: str = "CPU"
    amount: float = 1.0

    def __str__(self) -> str:
        return f"a {self.resource} each" if self.amount == 1 else f"{self.amount:g} {self.resource}s each"

    def room(self, amount: float) -> int:
        """Return how many ranks an amount of the resource is enough for."""
        return int(amount / self.amount + 1e-6)


CPU = Unit()


@dataclass(frozen=True)
class Placement:
    nodes: Sequence[RayNode]  # the node of this process first
    shares: Sequence[range]  # ranks of every node
    release: Callable[[], None] = lambda: None  # give what was reserved back
    group: Any = None  # the placement group that was made for it
    variables: Sequence[dict[str, str]] = ()  # of the environment of every node's ranks; (): as it is


class Wait:
    """The time that a start has to find nodes."""

    def __init__(self, seconds: float, quiet_seconds: float = 0.0) -> None:
        """quiet_seconds: at the beginning, without log lines."""
        self._deadline = time.monotonic() + seconds
        self._quiet_until = time.monotonic() + quiet_seconds
        self._reason, self._logged_at = "", 0.0

    @property
    def left(self) -> float:
        """Seconds; 0 when time is over."""
        return max(0.0, self._deadline - time.monotonic())

    def pause(self, reason: str) -> None:
        """Wait a moment. Raise EngineError with the reason when time is over."""
        if not self.left:
            raise EngineError(f"Ray nodes were not available within engine_start_timeout: {reason}")
        now = time.monotonic()
        if now > self._quiet_until and (reason != self._reason or now - self._logged_at > LOG_EVERY_S):
            logger.warning("waiting for Ray nodes, for up to %.0f s: %s", self.left, reason)
            self._reason, self._logged_at = reason, now
        time.sleep(min(PAUSE_S, self.left))


def export_group() -> None:
    """Inside a Ray actor or task: name its cluster and placement group in the environment, for engine processes it starts."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    group, own = ray.util.get_current_placement_group(), ray.get_gpu_ids()
    if own:
        os.environ[GPUS] = ",".join(map(str, own))
    if group is not None:
        os.environ[GROUP] = group.id.hex()
        os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)


def find_placement(ray: Any, ranks: int, count: int, wait: Wait, unit: Unit = CPU) -> Placement:
    """Reserve a CPU, or a GPU, for every rank, once the cluster has them.

    count: nodes to use; 1 = as few as have room.
    """
    here, group = ray.get_runtime_context().get_node_id(), current_group(ray) if unit is CPU else None
    while True:
        known = ray.nodes()
        alive = sorted((node for node in known if node["Alive"]), key=lambda node: node["NodeID"] != here)
        room = {node["NodeID"]: unit.room(node["Resources"].get(unit.resource, 0)) for node in alive}
        may_grow = len(alive) < len(known)  # a lost node may come back
        if group is not None:
            state, room = _bundles(group)
            if state != "CREATED" or not room.keys() <= {node["NodeID"] for node in alive}:
                wait.pause(f"the placement group {group} is {state}")
                continue
            if here not in room:
                raise ConfigError(f"the Ray placement group {group} has no bundle on the node of this process; add one")
            alive, may_grow = [node for node in alive if node["NodeID"] in room], False
        try:
            shares = _share(ranks, count, [room[node["NodeID"]] for node in alive], unit)
        except ConfigError as error:
            if not may_grow:
                raise
            wait.pause(str(error))
            continue
        used = alive[: len(shares)]
        if group is not None:
            return Placement(used, shares)
        if (placement := _reserve(ray, used, shares, wait, unit)) is not None:
            return placement


def current_group(ray: Any) -> str | None:
    """Return the placement group of this actor or task, or of the one that started this process."""
    group = ray.util.get_current_placement_group() if ray.is_initialized() else None
    return os.environ.get(GROUP) or None if group is None else str(group.id.hex())


def _bundles(group: str) -> tuple[str, dict[str, int]]:
    """Return the state of a placement group, and by node the number of ranks its bundles can have.

    A rank needs a GPU, or a CPU if no bundle has a GPU.
    """
    entry = group_entry(group)
    kind = "GPU" if any(bundle.get("GPU") for bundle in entry["bundles"].values()) else "CPU"
    room: Counter[str] = Counter()
    own = own_bundles()
    for index, bundle in entry["bundles"].items():
        if own and index not in own:
            continue
        room[entry["bundles_to_node_id"][index]] += int(bundle.get(kind, 0))
    return entry["state"], {node: size for node, size in room.items() if size}


def own_bundles() -> list[int]:
    """Return the bundles that this engine has of its placement group; []: all."""
    return [int(index) for index in os.environ.get(RAY_BUNDLES, "").split(",") if index]


def group_entry(group: str) -> dict[str, Any]:
    """Return what Ray knows of a placement group."""
    entry: dict[str, Any] | None = placement_groups().placement_group_table().get(group)
    if entry is None or entry["state"] == "REMOVED":
        raise ConfigError(f"the Ray placement group {group} of this process does not exist any more")
    return entry


def _share(ranks: int, count: int, room: Sequence[int], unit: Unit) -> list[range]:
    """Return the ranks of every node that is used. room: how many every node can have."""
    if count > len(room):
        raise ConfigError(f"nnodes={count}, and the Ray cluster has {len(room)}; lower it, or start more nodes")
    if count > 1:
        shares = share_ranks(ranks, count)
    else:
        shares, begun = [], 0
        for size in room:
            shares.append(range(begun, min(ranks, begun + size)))
            begun = shares[-1].stop
            if begun == ranks:
                break
    short = [node for node, share in enumerate(shares) if len(share) > room[node]]
    if short or shares[-1].stop < ranks or not shares[0]:
        there = ", ".join(map(str, room))
        raise ConfigError(
            f"{ranks} ranks require {unit}, the first of them on this node; the nodes of the Ray cluster have {there}"
        )
    return [share for share in shares if share]


def _reserve(ray: Any, used: Sequence[RayNode], shares: Sequence[range], wait: Wait, unit: Unit) -> Placement | None:
    """Reserve what every rank needs until the placement is released or this process ends. None: a node was lost.

    The placement group has a bundle for every rank.
    """
    addresses = [node["NodeManagerAddress"] for node in used]
    bundles = [
        {unit.resource: unit.amount, f"node:{address}": 0.0001}
        for address, share in zip(addresses, shares, strict=True)
        for _ in share
    ]
    group = placement_groups().placement_group(bundles, strategy="PACK")

    def release() -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            placement_groups().remove_placement_group(group)

    try:
        while not group.wait(timeout_seconds=min(RESERVE_S, wait.left)):
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            if not all(node["NodeID"] in alive for node in used):
                release()
                return None
            free, name = ray.available_resources().get(unit.resource, 0), unit.resource
            sizes = ", ".join(f"{len(share)} on {address}" for address, share in zip(addresses, shares, strict=True))
            each = f"a free {name} each" if unit.amount == 1 else str(unit)
            wait.pause(f"ranks need {each} ({sizes}); {free:g} {name}s of the cluster are free, others hold the rest")
    except BaseException:
        release()
        raise
    return Placement(used, shares, release, group)


def placement_groups() -> Any:
    return importlib.import_module("ray.util.placement_group")  # `ray.util` has a function of this name


class _NodeLost(Exception):
    """A Ray node was lost while its ranks started."""


class _Agent:
    """The actor of a node."""

    def run(self, first: tuple[str, int], node: int, host: str, key: str, args: EngineArgs, variables: dict[str, str]) -> bool:
        """variables: of the environment of its ranks."""
        os.environ.update(variables)
        return nodes.run_node(tuple(first), node, host, key, connect_timeout(args), own_terms(args))  # type: ignore[arg-type]


def start_nodes(args: EngineArgs, ranks: int, reserved: Placement | None = None) -> nodes.Links:
    """Start ranks on other nodes.

    args.nnodes: nodes to use; 1: as few as have the CPUs.
    reserved: where ranks on GPUs run. If a node of it is lost, the start fails: this process may have used its GPU.
    """
    ray = connect_cluster(ranks)
    wait = Wait(args.engine_start_timeout)
    while True:
        with doing(f"waiting for the CPUs of {ranks} ranks in the Ray cluster"):
            placement = reserved or find_placement(ray, ranks, args.nnodes, wait)
        agents: list[Any] = []
        try:
            links = _start_others(ray, placement, args, wait, agents)
        except _NodeLost as error:
            _end(ray, agents, placement)
            if reserved is not None:
                raise EngineError(str(error)) from None
            wait.pause(str(error))
        except BaseException:
            _end(ray, agents, placement)
            raise
        else:
            links.then = partial(_end, ray, agents, placement)
            return links


def _start_others(ray: Any, placement: Placement, args: EngineArgs, wait: Wait, agents: list[Any]) -> nodes.Links:
    """agents: gets the actors that were started."""
    shares, others = placement.shares, placement.nodes[1:]
    if not others:
        return nodes.Links(shares)
    key, host = secrets.token_hex(16), placement.nodes[0]["NodeManagerAddress"]
    with handshake.listen((host, 0)) as listener, doing(f"starting ranks on {len(others)} other nodes"):
        first = (host, listener.getsockname()[1])
        runs = []
        for number, node in enumerate(others, 1):
            agents.append(_make_agent(ray, node))
            own = _bundle_variables() | (placement.variables[number] if placement.variables else {})
            runs.append(agents[-1].run.remote(first, number, node["NodeManagerAddress"], key, args, own))
        seconds = min(wait.left, connect_timeout(args))
        remedy = "Look for the reason in Ray's logs of that node"
        return nodes.gather(listener, shares, key, seconds, terms_of(args), lambda: _check(ray, others, runs), remedy)


def _bundle_variables() -> dict[str, str]:
    """Return the variable with this engine's bundles, if it has bundles of its own."""
    return {RAY_BUNDLES: os.environ[RAY_BUNDLES]} if RAY_BUNDLES in os.environ else {}


def _check(ray: Any, others: Sequence[RayNode], runs: Sequence[Any]) -> None:
    """Raise why, if an actor has ended before its ranks joined."""
    ended, _ = ray.wait(list(runs), num_returns=len(runs), timeout=0)
    for number, (node, run) in enumerate(zip(others, runs, strict=True), 1):
        if run not in ended:
            continue
        name = f"node {number} ({node['NodeManagerAddress']})"
        try:
            ray.get(run)
        except ray.exceptions.RayTaskError as error:  # of our code
            raise EngineError(f"{name} could not start its ranks: {error.cause}") from None
        except ray.exceptions.RayError as error:
            raise _NodeLost(f"{name} was lost: {type(error).__name__}") from None
        raise _NodeLost(f"the ranks of {name} were lost")


def _end(ray: Any, agents: list[Any], placement: Placement) -> None:
    """End the actors, and with them their ranks; give the reserved CPUs back."""
    while agents:
        with contextlib.suppress(Exception):  # the cluster may be gone
            ray.kill(agents.pop())
    placement.release()


def connect_cluster(ranks: int) -> Any:
    """Connect to the Ray cluster, or start one. Return the module ray."""
    ray = import_ray()
    _connect(ray, ranks)
    return ray


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("ray as a backend requires the extra ray: pip install 'quire[ray]'") from None
    return ray


def _connect(ray: Any, ranks: int) -> None:
    if ray.is_initialized():
        return
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "quire"}
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            _refuse_unreachable(address)
            host = os.environ.get(NODE_ADDRESS)  # where several addresses are this machine's
            ray.init(address=address, **options, **({"_node_ip_address": host} if host else {}))
        else:
            try:
                ray.init(address="auto", **options)
            except ConnectionError:
                cpus = int(os.environ.get(LOCAL_CPUS) or ranks)
                ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=100 << 20, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"the Ray cluster {address or ''} cannot be used: {error}") from None
    atexit.register(_shut_down, ray)


def _refuse_unreachable(address: str) -> None:
    """Raise ConnectionError unless a process listens at the address: Ray would try again for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return  # auto, or an address of Ray Client
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"{error}. Start the cluster (ray start --head), or change RAY_ADDRESS") from None


def _shut_down(ray: Any) -> None:
    with contextlib.suppress(Exception):
        ray.shutdown()


def _make_agent(ray: Any, node: RayNode) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return make_actor(ray, _Agent, num_cpus=0, scheduling_strategy=strategy)


def make_actor(ray: Any, kind: type, **options: Any) -> Any:
    """Start an actor that can import what this process can."""
    ours = environment() or {}
    variables = {"PYTHONPATH": ours["PYTHONPATH"]} if "PYTHONPATH" in ours else {}
    return ray.remote(kind).options(**options, runtime_env={"env_vars": variables} if variables else None).remote()
