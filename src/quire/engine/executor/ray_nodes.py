"""Ray as the launcher of ranks on other nodes: an existing cluster, or one on this machine.

    this node     the engine, and the first ranks (`workers.py`)
    other nodes   an actor each, which starts the node's ranks and watches them (`nodes.run_node`)

A placement group reserves a CPU for every rank while they live (`ray_placement.py`). Data goes over our own connections; Ray
only starts and ends actors, and ends them with the engine. `ray` is an extra: pip install 'quire[ray]'.
"""

import atexit
import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.config.args import EngineArgs, connect_timeout
from quire.engine import handshake
from quire.engine.agreement import own_terms, terms_of
from quire.engine.executor import nodes
from quire.engine.executor.ray_placement import Placement, RayNode, Wait, find_placement
from quire.proc.spawn import environment
from quire.progress import doing
from quire.types.errors import ConfigError, EngineError

LOCAL_CPUS = "QUIRE_RAY_CPUS"  # of a cluster that is started here; default: as many as ranks are wanted
logger = logging.getLogger(__name__)


class _NodeLost(Exception):
    """A Ray node was lost while its ranks started."""


class _Agent:
    """What an actor does."""

    def run(self, first: tuple[str, int], node: int, host: str, key: str, args: EngineArgs) -> bool:
        return nodes.run_node(tuple(first), node, host, key, connect_timeout(args), own_terms(args))  # type: ignore[arg-type]


def start_nodes(args: EngineArgs, ranks: int) -> nodes.Links:
    """args.nnodes: nodes to use; 1 = as few as have the CPUs."""
    ray = _import()
    _connect(ray, ranks)
    wait = Wait(args.engine_start_timeout)
    while True:
        with doing(f"waiting for the CPUs of {ranks} ranks in the Ray cluster"):
            placement = find_placement(ray, ranks, args.nnodes, wait)
        agents: list[Any] = []
        try:
            links = _start_others(ray, placement, args, wait, agents)
        except _NodeLost as error:
            _end(ray, agents, placement)
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
            runs.append(agents[-1].run.remote(first, number, node["NodeManagerAddress"], key, args))
        seconds = min(wait.left, connect_timeout(args))
        return nodes.gather(listener, shares, key, seconds, terms_of(args), lambda: _check(ray, others, runs))


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


def _make_agent(ray: Any, node: RayNode) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours = environment() or {}
    variables = {"PYTHONPATH": ours["PYTHONPATH"]} if "PYTHONPATH" in ours else {}
    actor = ray.remote(_Agent).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        runtime_env={"env_vars": variables} if variables else None,
    )
    return actor.remote()
