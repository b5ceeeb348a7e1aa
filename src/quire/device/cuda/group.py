"""How ranks on GPUs communicate. `open_cuda_group` chooses; QUIRE_CUDA_COLLECTIVES can choose otherwise.

    ranks                                 collectives                                                           CUDA graphs
    a GPU each, on one node               `one_shot.py` for small messages, `nccl.py` for large ones            yes
    the same, without peer access         `nccl.py`                                                             no
    a GPU each, on several nodes          `nccl.py`                                                             yes
    sharing a GPU                         `host_group.py`: a byte to every rank through the host                no
    sharing a GPU, symmetric              `one_shot.py` for all messages                                        yes

In every case sums are added in rank order, so the choice changes no bits.
"""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.device.cuda.host_group import HostGroup
from quire.device.cuda.nccl import LOOPBACK, NCCL, connect_check
from quire.device.cuda.one_shot import Everyone, OneShot
from quire.device.cuda.shared_bytes import CUDALinks
from quire.dist.collectives import RankGroup
from quire.dist.mesh import Position, evenly
from quire.dist.shared_memory import PeerWatch, SharedMemoryGroup, open_group
from quire.ops.kernels.one_shot import MAX_BYTES
from quire.types.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

COLLECTIVES = "QUIRE_CUDA_COLLECTIVES"  # environment
CHOICES = ("auto", "symmetric", "nccl", "host")
GPU_ID_BYTES = 16
ABANDON_TIMEOUT_S = 5.0  # for kernels to end that wait for a lost rank


@dataclass(frozen=True)
class Choice:
    """What ranks use."""

    host: bool = False  # exchange through the host
    one_shot: bool = False
    nccl: bool = False
    records: bool = False  # collectives are recorded in CUDA graphs


def choose(asked: str, shared: bool, nodes: bool, has_nccl: bool = True) -> Choice:
    """Return what ranks use.

    asked: the value of QUIRE_CUDA_COLLECTIVES. shared: ranks share a GPU. nodes: ranks are on several nodes.
    """
    if asked not in CHOICES:
        raise ConfigError(f"{COLLECTIVES} must be one of {', '.join(CHOICES)}; got {asked}")
    if nodes and asked in ("symmetric", "host"):
        raise ConfigError(f"{COLLECTIVES}={asked} is not supported with ranks on several nodes. Unset it")
    if shared and (asked == "nccl" or nodes):
        raise ConfigError("NCCL requires a GPU for each rank, and two ranks of this engine share one. Use fewer ranks")
    if asked == "host" or (shared and asked == "auto"):
        return Choice(host=True)
    if not shared and not has_nccl:
        raise ConfigError("ranks on several GPUs require NCCL, which this torch does not have. Install torch for CUDA")
    if nodes or asked == "nccl":
        return Choice(nccl=True, records=True)
    return Choice(one_shot=True, nccl=not shared, records=True)


class DeviceGroup:
    """Collectives that run on GPUs alone: no host waits for another one. All ranks make the same choices."""

    def __init__(
        self, position: Position, control: SharedMemoryGroup, one_shot: OneShot | None, nccl: NCCL | None, records: bool
    ) -> None:
        """control: exchanges messages of hosts. records: collectives are recorded in CUDA graphs."""
        self._position, self._control, self._one_shot, self._nccl = position, control, one_shot, nccl
        self.records = records

    def add(self, part: Tensor) -> Tensor:
        return self._way(part.numel() * part.element_size()).add(part) if part.numel() else part.clone()

    def join(self, part: Tensor, total: int) -> Tensor:
        size, rows = self._position.size, part.numel() // max(1, part.shape[-1])
        if not rows:
            return part.new_empty(*part.shape[:-1], total)
        widths = [len(evenly(total)(Position(rank, size))) for rank in range(size)]
        flat, longest = part.reshape(-1), rows * max(widths)
        if len(flat) < longest:
            flat = torch.cat([flat, flat.new_zeros(longest - len(flat))])
        gathered = self._way(longest * flat.element_size()).gather(flat)
        parts = zip(gathered, widths, strict=True)
        return torch.cat([each[: rows * width].view(*part.shape[:-1], width) for each, width in parts], -1)

    def largest(self, value: int) -> int:
        return self._control.largest(value)

    def late(self) -> list[int]:
        return [] if self._one_shot is None else self._one_shot.late()

    def abandon(self) -> bool:
        deadline = time.monotonic() + ABANDON_TIMEOUT_S
        try:
            if self._one_shot is not None:
                self._one_shot.release()
            if self._nccl is not None:
                self._nccl.abort()
            while not torch.cuda.current_stream().query():
                if time.monotonic() > deadline:
                    return False
                if self._one_shot is not None:
                    self._one_shot.release()  # again: a rank that still runs sets its flag
                time.sleep(0.01)
        except RuntimeError:  # the GPU itself failed
            return False
        return True

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.close()
        if self._one_shot is not None:
            self._one_shot.close()
        self._nccl = self._one_shot = None

    def _way(self, size: int) -> OneShot | NCCL:
        """Return what runs a collective with `size` bytes per rank."""
        if self._one_shot is None or (self._nccl is not None and size > one_shot_limit(self._position.size)):
            assert self._nccl is not None
            return self._nccl
        return self._one_shot


def one_shot_limit(ranks: int) -> int:
    """Return the bytes from which on NCCL is faster, because a one-shot collective reads all parts on every rank.

    The limits are those of vLLM's one-shot kernel; they have not been measured here.
    """
    return MAX_BYTES if ranks <= 4 else MAX_BYTES // 2


def open_cuda_group(
    position: Position,
    memory: int,
    peers: Mapping[int, socket.socket],
    watch: PeerWatch,
    device: torch.device,
    offset: int = 0,
    remote: Mapping[int, socket.socket] | None = None,
    first: int = 0,
) -> RankGroup:
    """Connect ranks on GPUs. The arguments are those of `Device.group`."""
    device = torch.device(device.type, torch.cuda.current_device())
    if remote:
        control = open_group(position, memory, peers, watch, offset, remote, first)
    else:
        control = HostGroup(position, memory, peers, watch, offset)
    everyone = control.all_gather_bytes
    choice = agree(everyone, position, device, bool(remote))
    if choice.host:
        assert isinstance(control, HostGroup)
        control.open(device)
        return control
    one_shot, records = OneShot(position, CUDALinks(device)) if choice.one_shot else None, choice.records
    if one_shot is not None and (problem := one_shot.open(everyone)):
        one_shot, records = None, False
        if not choice.nccl:
            raise EngineError(f"ranks cannot use each other's GPU memory: {problem}. Unset {COLLECTIVES}")
        logger.warning(
            "GPUs cannot use each other's memory (%s): one-shot collectives and CUDA graphs are disabled; all sums use NCCL "
            "and all steps run eagerly. `quire doctor --parallel` names the GPUs; %s=nccl keeps CUDA graphs",
            problem, COLLECTIVES,
        )  # fmt: skip
    nccl = None
    if choice.nccl:
        host = next(iter(remote.values())).getsockname()[0] if remote else LOOPBACK
        nccl = NCCL(position, everyone, host, device, connect_check(control, watch))
    return DeviceGroup(position, control, one_shot, nccl, records)


def agree(everyone: Everyone, position: Position, device: torch.device, nodes: bool) -> Choice:
    """Return the same choice on all ranks."""
    asked = os.environ.get(COLLECTIVES) or "auto"
    nccl = torch.distributed.is_nccl_available()
    messages = everyone(_gpu_id(device) + bytes([nccl]) + asked.encode()[:64])
    gpus = {message[:GPU_ID_BYTES] for message in messages}
    others = {message[GPU_ID_BYTES + 1 :].decode(errors="replace"): rank for rank, message in enumerate(messages)}
    if len(others) > 1:
        values = ", ".join(f"{value} on rank {rank}" for value, rank in others.items())
        raise ConfigError(f"{COLLECTIVES} must be the same on all ranks; got {values}")
    return choose(asked, len(gpus) < position.size, nodes, all(message[GPU_ID_BYTES] for message in messages))


def _gpu_id(device: torch.device) -> bytes:
    """Return an id of the GPU that does not depend on its index in this process."""
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[:GPU_ID_BYTES]
