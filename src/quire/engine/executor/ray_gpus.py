"""The GPUs of ranks that Ray starts: reserved before the device is queried, since CUDA sees the GPUs that are visible then.

    this process    an actor with GPUs: they are those of the first ranks; else ranks here need reserved ones too
    holders         an actor for every other rank, in a bundle of the placement group: holds a GPU, or a part of one, and
                    reports which (`ray.get_gpu_ids`)

Ranks are ordered by node, this one first. A node's ranks see all GPUs that were reserved on it. The placement group is the one
of this actor or task, or one of our own. VLLM_RAY_PER_WORKER_GPUS is the part of a GPU that a rank needs; ranks may then share
a GPU.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quire.config.args import EngineArgs
from quire.config.devices import SHARE
from quire.device.registry import VISIBLE
from quire.engine.executor.nodes import share_ranks
from quire.engine.executor.ray_nodes import (
    GPUS,
    Placement,
    Unit,
    Wait,
    connect_cluster,
    current_group,
    find_placement,
    group_entry,
    make_actor,
    own_bundles,
    placement_groups,
)
from quire.progress import doing
from quire.types.errors import ConfigError, EngineError

PART = "VLLM_RAY_PER_WORKER_GPUS"  # environment: GPUs per rank
ANY_BUNDLE = -1  # of a placement group
REPORT_TIMEOUT_S = 5.0  # between two looks at the holders


class _Holder:
    """The actor that holds the GPU of a rank."""

    def report(self) -> tuple[str, list[str]]:
        """Return its node and GPU."""
        import ray

        return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


_reserved: list[Placement] = []  # by `reserve_gpus`, until `take_reservation`


def reserve_gpus(args: EngineArgs) -> None:
    """Reserve the GPUs of all ranks, and make those of this node visible to this process.

    With device "auto" and no GPU on this Ray node or in the placement group, ranks run on CPUs, and nothing is reserved.
    """
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if ranks == 1 or args.device not in ("auto", "cuda"):
        return
    release_reservation()  # of a start that failed
    ray, wait = connect_cluster(ranks), Wait(args.engine_start_timeout)
    if args.device == "auto" and not _offers_gpus(ray):
        return
    with doing(f"waiting for the GPUs of {ranks} ranks in the Ray cluster"):
        reserved = _reserve(ray, ranks, args.nnodes, wait)
    try:
        _show(reserved.variables[0])
    except BaseException:
        reserved.release()
        raise
    _reserved.append(reserved)


def take_reservation() -> Placement:
    if not _reserved:
        raise ConfigError("ranks on GPUs require GPUs of the Ray cluster. Start its nodes with --num-gpus, or use device=cpu")
    return _reserved.pop()


def release_reservation() -> None:
    """Give GPUs back that no engine has taken."""
    while _reserved:
        _reserved.pop().release()


def read_part(value: str) -> float:
    """Return the GPUs that a rank needs: 1, or a part of one."""
    with contextlib.suppress(ValueError):
        if 0 < float(value) <= 1:
            return float(value)
    raise ConfigError(f"{PART} must be a number above 0 and at most 1; got {value!r}")


def _offers_gpus(ray: Any) -> bool:
    if _own_gpus(ray):
        return True
    group = current_group(ray)
    if group is not None:
        return any(bundle.get("GPU") for bundle in group_entry(group)["bundles"].values())
    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and node["Resources"].get("GPU") for node in ray.nodes())


def _own_gpus(ray: Any) -> list[str]:
    """Return the GPUs that Ray gave to this actor or task, or to the one that started this process."""
    own = [str(gpu) for gpu in ray.get_gpu_ids()]  # in any order
    return sorted(own, key=lambda gpu: (len(gpu), gpu)) or [gpu for gpu in os.environ.get(GPUS, "").split(",") if gpu]


def _reserve(ray: Any, ranks: int, count: int, wait: Wait) -> Placement:
    """count: nodes to use; 1: as few as have the GPUs."""
    here, group, part = ray.get_runtime_context().get_node_id(), current_group(ray), os.environ.get(PART)
    own = _own_gpus(ray)[:ranks]
    holders: list[Any] = []
    made: Placement | None = None

    def release() -> None:
        for holder in holders:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(holder)
        if made is not None:
            made.release()

    try:
        amount, places = 1.0, list[tuple[Any, int]]()
        if own and len(own) < ranks and group is None:
            raise ConfigError(
                f"this Ray actor or task has {len(own)} GPUs and no placement group, and {ranks} ranks require a GPU each. "
                f"Give it num_gpus={ranks}, or a placement group with a GPU for each rank"
            )
        if not own and group is None:
            amount = read_part(part or "1")
            made = find_placement(ray, ranks, count, wait, Unit("GPU", amount))
            places = [(made.group, index) for index in range(ranks)]
        elif len(own) < ranks:
            assert group is not None
            entry = group_entry(group)
            sizes = [size for bundle in entry["bundles"].values() if (size := bundle.get("GPU", 0)) > 0]
            if not sizes:
                raise ConfigError(f"the Ray placement group {group} has no GPUs. Add them to its bundles, or use device=cpu")
            amount = read_part(part) if part else min(1.0, *sizes)
            handle = handle_of(group)
            bundles = own_bundles() or [ANY_BUNDLE] * ranks
            places = [(handle, bundle) for bundle in bundles[len(own) : ranks]]
        found = [(here, [gpu]) for gpu in own] + _hold(ray, places, amount, wait, holders)
        return _arrange(ray, found, here, count, release)
    except BaseException:
        release()
        raise


def _hold(
    ray: Any, places: Sequence[tuple[Any, int]], amount: float, wait: Wait, holders: list[Any]
) -> list[tuple[str, list[str]]]:
    """Start an actor for each place, a placement group and a bundle. Return nodes and GPUs. holders: gets the actors."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    for group, bundle in places:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        holders.append(make_actor(ray, _Holder, num_cpus=0, num_gpus=amount, scheduling_strategy=strategy))
    reports = [holder.report.remote() for holder in holders]
    if not reports:
        return []
    while True:
        ready, late = ray.wait(reports, num_returns=len(reports), timeout=min(REPORT_TIMEOUT_S, wait.left))
        if not late:
            break
        wait.pause(
            f"ranks need {Unit('GPU', amount)}; {len(ready)} of {len(reports)} are reserved, and the placement group has no "
            "more that are free"
        )
    try:
        found: list[tuple[str, list[str]]] = ray.get(reports)
    except ray.exceptions.RayError as error:
        raise EngineError(f"a Ray node was lost while its GPUs were reserved: {type(error).__name__}") from None
    return found


def _arrange(
    ray: Any, found: Sequence[tuple[str, Sequence[str]]], here: str, count: int, release: Callable[[], None]
) -> Placement:
    """found: node and GPU of every rank, in any order. count: nodes that were asked for; 1: any number."""
    names = sorted({node for node, _ in found}, key=lambda node: (node != here, node))
    if names[0] != here:
        raise ConfigError(
            "no GPU that Ray reserved is on the node of this process, which has the first rank. Add a bundle on it"
        )
    sizes = [sum(node == name for node, _ in found) for name in names]
    if count > 1 and sizes != [len(share) for share in share_ranks(len(found), count)]:
        raise ConfigError(
            f"nnodes={count} requires that many nodes with equally many ranks; Ray reserved {sizes}. Leave it out"
        )
    begin = [sum(sizes[:index]) for index in range(len(sizes))]
    shares = [range(first, first + size) for first, size in zip(begin, sizes, strict=True)]
    gpus = [list(dict.fromkeys(gpu for node, own in found if node == name for gpu in own)) for name in names]
    known = {node["NodeID"]: node for node in ray.nodes()}
    sharing = any(len(own) < size for own, size in zip(gpus, sizes, strict=True))
    variables = [{VISIBLE: ",".join(own)} | ({SHARE: "1"} if sharing else {}) for own in gpus]
    return Placement([known[name] for name in names], shares, release, variables=variables)


def _show(variables: dict[str, str]) -> None:
    """Make the GPUs of this node visible to this process, and to its ranks."""
    torch = sys.modules.get("torch")
    first = variables[VISIBLE].split(",")[0]
    if torch is not None and torch.cuda.is_initialized() and os.environ.get(VISIBLE, "0").split(",")[0] != first:
        raise ConfigError(
            f"Ray reserved GPU {first} for the rank of this process, which has used CUDA with {VISIBLE}="
            f"{os.environ.get(VISIBLE, '')!r}. Create the LLM in a process that has not, such as a Ray actor with num_gpus"
        )
    os.environ.update(variables)


def handle_of(group: str) -> Any:
    module = placement_groups()
    return module.PlacementGroup(module.PlacementGroupID(bytes.fromhex(group)))
