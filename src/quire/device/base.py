"""Define the interface between the engine and a device: subclass `Device`. `docs/devices.md` explains how a package adds one.

Importing this file, or the module of a device, must not import torch: processes that never run a step read device facts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.types.cache import CacheLayout, KVLayout
from quire.types.errors import ConfigError
from quire.types.stats import DeviceCounts

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from quire.attn.batch import Batch
    from quire.config.facts import DeviceFacts, ModelFacts
    from quire.device.updates import DeviceUpdates
    from quire.dist.channel import Ends, Neighbours, Shape
    from quire.dist.collectives import RankGroup
    from quire.dist.mesh import Position
    from quire.dist.shared_memory import PeerWatch
    from quire.models.decoder import Decoder

GIB = 2**30


@dataclass(frozen=True)
class PlannedBudget:
    """Device memory as planned, in bytes."""

    usable: int  # share of the device's memory that the engine may use
    reserved: int  # for the device's runtime
    cache: int  # for KV cache pages; negative if memory is missing


class Body(Protocol):
    """The part of a decoder from embedded tokens to the hidden states of the final tokens."""

    def __call__(self, x: "Tensor", batch: "Batch") -> "Tensor":
        """Return hidden states [K, H] of the tokens that the batch keeps; x is [T, H]. The next call may overwrite the
        result.
        """
        ...


class Recording(Protocol):
    """A recorded step."""

    def replay(self) -> "Tensor":
        """Run the step again. Return the tensor of the recording, which now has new values."""
        ...


class Recorder(Protocol):
    """Record steps, so that they can be replayed with one launch."""

    def capture(self, run: Callable[[], "Tensor"]) -> Recording:
        """Record what `run` launches, without running it.

        The result (float32, contiguous) is valid until the next replay of any recording. Raises RuntimeError if `run` cannot
        be recorded, or must run once before it can be recorded.
        """
        ...

    def taken_bytes(self) -> int:
        """Return the device memory that all recordings use, in bytes."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A model, prepared for its device."""

    body: Body
    kv_layout: KVLayout = KVLayout.PAGES  # the cache layout that the body requires
    batch_dependence: str = ""  # why results depend on the batch, named when `deterministic` is refused; "": they do not


@dataclass(frozen=True)
class Setting:
    """What `Device.prepare` gets in addition to the model."""

    facts: "ModelFacts"
    dtype: "torch.dtype"
    layout: CacheLayout
    load_format: str
    tapped: bool = False  # hidden states between layers are read, so layers must run one by one


@dataclass(frozen=True)
class LinkRemark:
    """A fact about the links between devices."""

    text: str
    problem: bool = False  # ranks will not start, or will be slow


class Device:
    """One device. The order of calls: `facts` (before the configuration is resolved), `start` (before the model is built),
    `prepare` (after its weights are loaded), `budget` (before the cache is allocated), `note` (before every step), `close`.

    The defaults suit any device that torch knows: the model runs layer by layer in torch.
    """

    name = ""  # the value of the argument `device`
    records = False  # a step can be recorded and replayed: requires `recorder`
    samples_alike = False  # every rank samples by itself; else rank 0 sends its tokens, and its host waits for the device
    compiles = False  # kernels are compiled at their first run, so the engine runs warm-up steps at start

    def facts(self, memory: int | None = None) -> "DeviceFacts":
        """Return the facts that decide the configuration. Raises ConfigError if there is no such device.

        memory: bytes of a device that is only assumed, e.g. by `quire plan`. The device is then not queried and torch not
        imported.
        """
        raise NotImplementedError

    def take_part(self, engine: int, engines: int, sharing: bool = False, ranks: int = 1) -> None:  # noqa: ARG002
        """Select this process's share of the device for one of several engines on this machine. Called before anything else.

        engine, engines: index and number of the engines.
        sharing: several engines may use one device, because the memory of each is configured.
        ranks: ranks per engine, each with a device of its own.
        Raises ConfigError if there are not enough devices.
        """
        raise ConfigError(f"data_parallel_size={engines} is not supported with device {self.name}, which is not divided; use 1")

    @property
    def torch_device(self) -> "torch.device":
        """The torch device of all tensors: the one named like this device, or the CPU if torch does not know the name."""
        import torch

        try:
            return torch.device(self.name)
        except RuntimeError:
            return torch.device("cpu")

    def start(self) -> None:
        """Set up the process that runs steps. Called after torch was imported."""

    def take_rank(self, rank: int) -> None:
        """Select the device of a rank. Called once, before anything else; ranks of this machine may share a device or have
        one each.
        """

    def sharers(self, ranks: int) -> int:
        """Return how many of a machine's ranks share one memory."""
        return ranks

    def check_links(self, ranks: int) -> Sequence[LinkRemark]:  # noqa: ARG002
        """Return what is known of the links between this machine's devices, on which `ranks` ranks will run."""
        return ()

    def group(
        self,
        position: "Position",
        memory: int,
        peers: "Mapping[int, socket.socket]",
        watch: "PeerWatch",
        offset: int = 0,
        remote: "Mapping[int, socket.socket] | None" = None,
        first: int = 0,
    ) -> "RankGroup":
        """Return the group by which ranks communicate. All its ranks call this at the same time.

        memory, offset: a file that the ranks of this node share, and where the group's part of it begins.
        peers, remote: connections to the group's other ranks, on this node and on others.
        first: the number that `watch`, `peers` and `remote` have for position 0.
        """
        from quire.dist.shared_memory import open_group

        return open_group(position, memory, peers, watch, offset, remote, first)

    def channel(self, shape: "Shape", neighbours: "Neighbours", watch: "PeerWatch") -> "Ends":
        """Return the channel by which pipeline stages send hidden states."""
        from quire.dist.channel import open_ends

        return open_ends(shape, neighbours, watch)

    def prepare(self, model: "Decoder", setting: Setting) -> Prepared:  # noqa: ARG002
        """Return what runs a loaded model from now on. It may repack weights and free their memory."""
        return Prepared(model.run_blocks)

    def allocate(self, pages: int, page_bytes: int) -> "Tensor":
        """Return the raw memory of a cache, [pages, page_bytes] uint8, all zero."""
        import torch

        return torch.zeros(pages, page_bytes, dtype=torch.uint8, device=self.torch_device)

    def budget(self, utilization: float, profile_run: Callable[[], None], reserve: int) -> int:
        """Return the bytes for the KV cache. Raises ConfigError if none are left.

        utilization: share of the device's memory that the engine may use.
        profile_run: runs the largest step.
        reserve: bytes that recorded steps will need later.
        """
        raise NotImplementedError

    def held(self, utilization: float) -> tuple[int, int]:  # noqa: ARG002
        """Return the bytes that the engine may use, and the bytes in use by any process; (0, 0) if unknown."""
        return 0, 0

    def plan_budget(self, total: int, utilization: float, used: int) -> PlannedBudget:
        """Predict `budget` for a device with `total` bytes, which need not exist. The model and its largest step use `used`
        bytes.
        """
        usable = int(total * utilization)
        return PlannedBudget(usable, 0, usable - used)

    def collective_bytes(self, ranks: int, nodes: int, link: str | None) -> int:  # noqa: ARG002
        """Predict the bytes of a device for the collectives of `ranks` ranks on `nodes` nodes.

        link: between devices of a node (`sim/links.py`); None: unknown.
        """
        return 0

    def updates(self) -> "DeviceUpdates":
        """Return the writer of small array changes on the device."""
        from quire.device.updates import DeviceUpdates

        return DeviceUpdates()

    def recorder(self) -> Recorder:
        raise NotImplementedError

    def note(self, tokens: int) -> None:
        """Note that a step of `tokens` tokens is next."""

    def counts(self) -> DeviceCounts:
        """Return what was compiled and loaded since the process started."""
        return DeviceCounts()

    def synchronize(self) -> None:
        """Wait until all launched work is done."""

    def close(self) -> None:
        """Release memory. The model is already gone."""


def no_memory(reason: str) -> ConfigError:
    """Return the error for a KV cache without memory."""
    return ConfigError(f"no memory is left for the KV cache: {reason}")
