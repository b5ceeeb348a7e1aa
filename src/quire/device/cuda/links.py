"""What is known of the links between this machine's GPUs before ranks are started."""

import itertools
import os
import socket
from collections.abc import Mapping, Sequence

import torch

from quire.device.base import GIB, LinkRemark

INTERFACES = "NCCL_SOCKET_IFNAME"
SLOW = {
    "NCCL_P2P_DISABLE": "NCCL copies through host memory",
    "NCCL_SHM_DISABLE": "NCCL uses the network within this machine",
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand",
}  # variables that turn a fast way off, and the effect


def check_links(ranks: int, variables: Mapping[str, str] = os.environ) -> list[LinkRemark]:
    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = sorted({f"{gpu.name} with {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus})
    remarks = [LinkRemark(f"{count} GPUs: {', '.join(kinds)}", len(kinds) > 1)]
    if count < ranks:
        remarks.append(LinkRemark(f"{ranks} ranks on this machine need a GPU each; {count} are visible", True))
    return (
        remarks + _peers(min(count, ranks)) + _nccl() + check_variables(variables, [name for _, name in socket.if_nameindex()])
    )


def _peers(count: int) -> list[LinkRemark]:
    if count < 2:
        return []
    without = [pair for pair in itertools.permutations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if not without:
        return [LinkRemark(f"{count} GPUs can read each other's memory")]
    pairs = ", ".join(f"{first} and {second}" for first, second in without if first < second)
    return [
        LinkRemark(
            f"GPUs {pairs} cannot read each other's memory: sums go through NCCL, hidden states through host memory", True
        )
    ]


def _nccl() -> list[LinkRemark]:
    if not torch.distributed.is_nccl_available():
        return [LinkRemark("this torch has no NCCL: GPUs that cannot read each other's memory cannot be used together", True)]
    return [LinkRemark(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")]  # type: ignore[no-untyped-call]


def check_variables(variables: Mapping[str, str], interfaces: Sequence[str]) -> list[LinkRemark]:
    """Return remarks about variables of NCCL. An interface is given by its prefix, or exactly after `=`; `^` excludes."""
    remarks = [
        LinkRemark(f"{name}={variables[name]}: {effect}", True)
        for name, effect in SLOW.items()
        if variables.get(name, "0") != "0"
    ]
    if (value := variables.get(INTERFACES, "")) and not value.startswith("^"):
        exact, wanted = value.startswith("="), value.lstrip("=").split(",")
        if not any(own == name or (own.startswith(name) and not exact) for name in wanted for own in interfaces):
            remarks.append(
                LinkRemark(f"{INTERFACES}={value} names no interface of this machine; it has {', '.join(interfaces)}", True)
            )
    return remarks
