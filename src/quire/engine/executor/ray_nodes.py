"""Ray as the launcher of ranks on other nodes: an existing cluster, or one on this machine.

    this node     the engine, and the first ranks (`workers.py`)
    other nodes   an actor each, which starts the node's ranks and watches them (`nodes.run_node`)

A placement group holds a CPU for every rank while they live. Data goes over our own connections; Ray only starts and ends
actors, and ends them with the engine. `ray` is an extra: pip install 'quire[ray]'.
"""

import atexit
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from quire.config.args import EngineArgs, connect_timeout
from quire.engine import handshake
from quire.engine.agreement import own_terms, terms_of
from quire.engine.executor import nodes
from quire.progress import doing
from quire.subprocesses import environment
from quire.types.errors import ConfigError

LOCAL_CPUS = "QUIRE_RAY_CPUS"  # of a cluster that is started here; default: as many as ranks are wanted
logger = logging.getLogger(__name__)


class _Agent:
    """What an actor does."""

    def run(self, first: tuple[str, int], node: int, host: str, key: str, args: EngineArgs) -> bool:
        return nodes.run_node(tuple(first), node, host, key, connect_timeout(args), own_terms(args))  # type: ignore[arg-type]


def start_nodes(args: EngineArgs, ranks: int) -> nodes.Links:
    """args.nnodes: nodes to use; 1 = as few as have the CPUs."""
    count, seconds = args.nnodes, connect_timeout(args)
    ray = _import()
    _connect(ray, ranks)
    here = ray.get_runtime_context().get_node_id()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
    shares = _share(ranks, count, [int(node["Resources"].get("CPU", 0)) for node in alive])
    release = _reserve(ray, alive, shares, seconds)
    try:
        links = nodes.Links(shares) if len(shares) == 1 else _start_others(ray, alive, shares, args)
    except BaseException:
        release()
        raise
    links.then = release
    return links


def _start_others(ray: Any, alive: Sequence[dict[str, Any]], shares: Sequence[range], args: EngineArgs) -> nodes.Links:
    key, host = secrets.token_hex(16), alive[0]["NodeManagerAddress"]
    with handshake.listen((host, 0)) as listener, doing(f"starting ranks on {len(shares) - 1} other nodes"):
        first = (host, listener.getsockname()[1])
        for number, node in enumerate(alive[1 : len(shares)], 1):
            _start_agent(ray, node, first, number, key, args)
        return nodes.gather(listener, shares, key, connect_timeout(args), terms_of(args))


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("distributed_executor_backend=ray needs the extra ray: pip install 'quire[ray]'") from None
    return ray


def _connect(ray: Any, ranks: int) -> None:
    if ray.is_initialized():
        return
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "quire"}
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            host = os.environ.get("QUIRE_RAY_NODE_IP")  # where several addresses are this machine's
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


def _shut_down(ray: Any) -> None:
    with contextlib.suppress(Exception):
        ray.shutdown()


def _share(ranks: int, count: int, cpus: Sequence[int]) -> list[range]:
    """Ranks of every node that is used."""
    if count > len(cpus):
        raise ConfigError(f"nnodes={count}, and the Ray cluster has {len(cpus)}; lower it, or start more nodes")
    if count > 1:
        shares = nodes.share_ranks(ranks, count)
    else:
        shares, begun = [], 0
        for have in cpus:
            shares.append(range(begun, min(ranks, begun + have)))
            begun = shares[-1].stop
            if begun == ranks:
                break
    short = [node for node, share in enumerate(shares) if len(share) > cpus[node]]
    if short or shares[-1].stop < ranks or not shares[0]:
        there = ", ".join(map(str, cpus))
        raise ConfigError(
            f"{ranks} ranks need a CPU each, the first of them on this node; the nodes of the Ray cluster have {there}"
        )
    return [share for share in shares if share]


def _reserve(ray: Any, alive: Sequence[dict[str, Any]], shares: Sequence[range], seconds: float) -> Callable[[], None]:
    """A CPU for every rank, until that is called or this process ends."""
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [
        {"CPU": float(len(share)), f"node:{node['NodeManagerAddress']}": 0.001}
        for node, share in zip(alive, shares, strict=False)
    ]
    group = placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=seconds)
    except Exception as error:
        remove_placement_group(group)
        raise ConfigError(f"the Ray cluster has no room for {shares[-1].stop} ranks: {type(error).__name__}") from None

    def release() -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            remove_placement_group(group)

    return release


def _start_agent(ray: Any, node: dict[str, Any], first: tuple[str, int], number: int, key: str, args: EngineArgs) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours = environment() or {}
    variables = {"PYTHONPATH": ours["PYTHONPATH"]} if "PYTHONPATH" in ours else {}
    actor = ray.remote(_Agent).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        runtime_env={"env_vars": variables} if variables else None,
    )
    agent = actor.remote()
    agent.run.remote(first, number, node["NodeManagerAddress"], key, args)
    _agents.append(agent)


_agents: list[Any] = []  # an actor that nobody holds is ended
