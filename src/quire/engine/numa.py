"""Binding processes to NUMA nodes: `numa_bind`. Reads /proc and /sys; imports no torch, whose threads inherit the binding."""

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from quire.config.args import EngineArgs, local_engines
from quire.config.host import usable_cores
from quire.device.registry import named_gpus
from quire.types.errors import ConfigError

_THREADS = "OMP_NUM_THREADS"


def bind_process(
    args: EngineArgs,
    engine: int,
    rank: int | None,
    root: Path = Path("/"),
    environ: MutableMapping[str, str] = os.environ,
) -> EngineArgs:
    """Restrict this process to the CPUs of its NUMA node; memory that it touches first is allocated there.

    Return the arguments for the other ranks of the engine, with the CPUs of this engine's ranks.

    engine: number of the engine on this machine
    rank: of this process; None = the first
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("numa_bind requires Linux. Remove it")
    engines, here = local_engines(args), -(-args.tensor_parallel_size * args.pipeline_parallel_size // args.nnodes)
    groups = [_cpus(args, engine * here + i, engines * here, root) for i in range(here)]
    cpus = groups[(rank or 0) % here]
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise ConfigError(
            f"numa_bind: this process may not run on the CPUs {sorted(cpus)} ({error.strerror}). "
            "Give other numa_bind_nodes or numa_bind_cpus"
        ) from None
    if not environ.get(_THREADS):
        environ[_THREADS] = str(max(1, usable_cores(root) // groups.count(cpus)))
    if engines == 1:
        return args
    return replace(args, numa_bind_nodes=None, numa_bind_cpus=[",".join(map(str, sorted(group))) for group in groups])


def _cpus(args: EngineArgs, index: int, count: int, root: Path) -> set[int]:
    if args.numa_bind_cpus is not None:
        return read_cpus(_of_rank("numa_bind_cpus", args.numa_bind_cpus, index))
    if args.numa_bind_nodes is not None:
        return _node_cpus(_of_rank("numa_bind_nodes", args.numa_bind_nodes, index), root)
    gpus = [] if args.device == "cpu" else _gpu_nodes(root)
    if gpus:
        return _node_cpus(str(gpus[index % len(gpus)]), root)
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    nodes = sorted(int(file.parent.name[4:]) for file in lists if file.read_text().strip())  # some have memory only
    if not nodes:
        raise ConfigError("numa_bind: the system names no NUMA nodes. Give numa_bind_nodes or numa_bind_cpus, or remove it")
    return _node_cpus(str(nodes[index * len(nodes) // count]), root)


def _of_rank(name: str, values: Sequence[str], index: int) -> str:
    if index >= len(values):
        raise ConfigError(
            f"{name} must have a value for every rank on this machine; got {len(values)}. Add one for rank {index}"
        )
    return str(values[index])


def _node_cpus(node: str, root: Path) -> set[int]:
    try:
        text = (root / f"sys/devices/system/node/node{int(node)}/cpulist").read_text()
    except (OSError, ValueError):
        text = ""
    if not text.strip():
        raise ConfigError(
            f"numa_bind_nodes must be NUMA nodes that have CPUs; got {node!r}. /sys/devices/system/node/has_cpu lists them"
        )
    return read_cpus(text)


def _gpu_nodes(root: Path) -> list[int]:
    """Return the NUMA node of each visible GPU, in the order of their PCI addresses."""
    addresses = sorted(folder.name.lower() for folder in (root / "proc/driver/nvidia/gpus").glob("*"))
    named = named_gpus()
    if named and all(name.isdigit() for name in named):
        addresses = [addresses[int(name)] for name in named if int(name) < len(addresses)]
    nodes = []
    for address in addresses:
        file = root / "sys/bus/pci/devices" / address / "numa_node"
        nodes.append(int(file.read_text()) if file.is_file() else -1)
    return [] if any(node < 0 for node in nodes) else nodes


def read_cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as 0-3,8."""
    cpus: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"numa_bind_cpus must be lists of CPUs such as 0-3,8; got {text!r}") from None
    return cpus
