"""The seam between the engine and what it runs on. A device is a subclass of `Device`; `docs/devices.md` says how another
package brings one.

Importing this file, or a device's own, imports no torch: facts are asked for by processes that never run a step.
"""

from collections.abc import Callable
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
    from quire.dist.mesh import Position
    from quire.dist.shared_memory import SharedMemoryGroup, Watch
    from quire.models.decoder import Decoder

GIB = 2**30


@dataclass(frozen=True)
class PlannedBudget:
    """Bytes."""

    usable: int  # of all there are
    reserved: int  # for the device's own programs
    cache: int  # for pages; below 0: so much is missing


class Body(Protocol):
    """A decoder's way from embedded tokens to the hidden states of the final ones."""

    def __call__(self, x: "Tensor", batch: "Batch") -> "Tensor":
        """x [T, H] -> [K, H] of the tokens that the batch keeps; it may be overwritten by the next call."""
        ...


class Recording(Protocol):
    """A step that was recorded."""

    def replay(self) -> "Tensor":
        """Runs it again, and returns what it made the first time, which has other values now."""
        ...


class Recorder(Protocol):
    def capture(self, run: Callable[[], "Tensor"]) -> Recording:
        """Records what `run` launches, without running it. What it returns (float32, contiguous) is good until the next
        replay of any recording. RuntimeError = it cannot be recorded, or not before it was run once."""
        ...

    def taken_bytes(self) -> int:
        """Of the device's memory, by all recordings."""
        ...


@dataclass(frozen=True)
class Prepared:
    """What a device made of a model."""

    body: Body
    kv_layout: KVLayout = KVLayout.PAGES  # how the body wants the cache to lie


@dataclass(frozen=True)
class Setting:
    """What is settled when a model is prepared."""

    facts: "ModelFacts"
    dtype: "torch.dtype"
    layout: CacheLayout
    load_format: str
    tapped: bool = False  # somebody listens between the layers, which have to be run one by one


class Device:
    """Life: `facts` decide the configuration, `start` comes before the model is built, `prepare` after its weights are there,
    `budget` before the cache is allocated, `note` before every step, `close` at the end.

    What is here suits any device that torch can name: the model runs layer by layer, as torch has it.
    """

    name = ""  # as users say it
    records = False  # can it record a step and replay it? Then it has a `recorder`
    draws_alike = False  # of several ranks each draws for itself? To be told, the first one's host would wait for its device
    compiles = False  # are kernels compiled when they are first run? Then steps are run before the first request comes

    def facts(self, memory: int | None = None) -> "DeviceFacts":
        """What suits it. Raises ConfigError where it is not there. `memory`: bytes, where somebody only supposes that it is
        there: nothing is asked then, and torch not imported."""
        raise NotImplementedError

    def take_part(self, engine: int, engines: int, sharing: bool = False, ranks: int = 1) -> None:  # noqa: ARG002
        """This process runs one of several engines on this machine: its part of the device, or those of several devices that
        are its own, is taken before anything else is asked. Raises ConfigError where there are not so many. `sharing`: it was
        said how much memory each takes, so that several may have one device. `ranks`: of each engine."""
        raise ConfigError(f"data_parallel_size={engines} is not supported with device {self.name}, which is not divided; use 1")

    @property
    def torch_device(self) -> "torch.device":
        """Where tensors live: where torch has a device of this name, there, and otherwise on the host."""
        import torch

        try:
            return torch.device(self.name)
        except RuntimeError:
            return torch.device("cpu")

    def start(self) -> None:
        """In the process that will run steps, after torch was imported."""

    def take_rank(self, rank: int) -> None:
        """This process is a rank of an engine, of those on this machine; several may share the device, or each have one of
        several. Once, before anything else is asked."""

    def sharers(self, ranks: int) -> int:
        """How many ranks of a machine have one memory."""
        return ranks

    def group(
        self, position: "Position", memory: int, peers: "Mapping[int, socket.socket]", watch: "Watch", offset: int = 0
    ) -> "SharedMemoryGroup":
        """How ranks of one machine meet."""
        from quire.dist.shared_memory import SharedMemoryGroup

        return SharedMemoryGroup(position, memory, peers, watch, offset)

    def channel(self, shape: "Shape", neighbours: "Neighbours", watch: "Watch") -> "Ends":
        """How stages of a pipeline hand on hidden states."""
        from quire.dist.channel import open_ends

        return open_ends(shape, neighbours, watch)

    def prepare(self, model: "Decoder", setting: Setting) -> Prepared:  # noqa: ARG002
        """A model whose weights are loaded -> what runs it from now on. It may repack weights and give memory back."""
        return Prepared(model.run_blocks)

    def allocate(self, pages: int, page_bytes: int) -> "Tensor":
        """Raw memory of a cache [pages, page_bytes] uint8, all zero."""
        import torch

        return torch.zeros(pages, page_bytes, dtype=torch.uint8, device=self.torch_device)

    def budget(self, utilization: float, profile_run: Callable[[], None], reserve: int) -> int:
        """Bytes for the cache; ConfigError = there are none. `utilization`: the share of its memory that the engine may have;
        `profile_run`: runs the largest step; `reserve`: bytes that are taken later, for recorded steps."""
        raise NotImplementedError

    def held(self, utilization: float) -> tuple[int, int]:  # noqa: ARG002
        """Bytes that the engine may have, and those in use by it and by others; 0 = it is not said."""
        return 0, 0

    def plan_budget(self, total: int, utilization: float, used: int) -> PlannedBudget:
        """What `budget` will come to on a device with `total` bytes, which need not be there, where a model and its largest
        step take `used` of them."""
        usable = int(total * utilization)
        return PlannedBudget(usable, 0, usable - used)

    def updates(self) -> "DeviceUpdates":
        """How small changes of arrays reach it."""
        from quire.device.updates import DeviceUpdates

        return DeviceUpdates()

    def recorder(self) -> Recorder:
        raise NotImplementedError

    def note(self, tokens: int) -> None:
        """A step of so many tokens is next."""

    def counts(self) -> DeviceCounts:
        """Of what was prepared since the process began."""
        return DeviceCounts()

    def synchronize(self) -> None:
        """Waits until whatever was launched is done."""

    def close(self) -> None:
        """The model is gone: memory may go back."""


def no_memory(reason: str) -> ConfigError:
    return ConfigError(f"no memory is left for the KV cache: {reason}")
