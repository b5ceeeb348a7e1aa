"""The eviction policy of cached pages, and the host tier that takes them: arguments, limits and memory."""

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.config.fields import FLAG, REAL, TEXT, setting
from quire.config.memory import parameter_parts
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.files.identity import identity
from quire.types.cache import EVICTION_POLICIES
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.config import Config

_GROUP = "cache and memory"
GIB = 2**30
STAGED_BYTES = 32 << 20  # of records that are moved together
OTHER_BUFFERS = 1 + 2  # for fetches, and the products of checksums, which are twice as large
DEFAULT_DISK_GIB = 16
MAX_STAGING_SHARE = 0.01  # of the device's memory


@dataclass
class TierArgs:
    cache_policy: str = setting(
        "lru",
        TEXT,
        _GROUP,
        "cached pages that are evicted first: unused for longest (lru), used least often (lfu), or saving the least "
        "computation, unless lru finds more (cost)",
        choices=EVICTION_POLICIES,
        after="enable_prefix_caching",
    )
    kv_offloading_size: float | None = setting(
        None, REAL, _GROUP, "GiB of host memory for cached pages that are evicted from the device, of all ranks of an engine "
        "together; default: none", low=0, after="cache_policy",
    )  # fmt: skip
    kv_offloading_backend: str = setting(
        "native", TEXT, _GROUP, "what keeps them", choices=("native",), after="kv_offloading_size"
    )
    kv_offloading_eager: bool = setting(
        False, FLAG, _GROUP, "store pages in host memory as soon as they are full, not only when they are evicted; requires "
        "kv_offloading_size", after="kv_offloading_backend",
    )  # fmt: skip
    kv_disk_path: str | None = setting(
        None, TEXT, _GROUP, "directory in which cached pages are kept, also for the next start; requires kv_offloading_size; "
        "default: none", after="kv_offloading_eager",
    )  # fmt: skip
    kv_disk_size: float = setting(
        DEFAULT_DISK_GIB, REAL, _GROUP, "GiB of pages in kv_disk_path, of all ranks of an engine together", above=0.0,
        after="kv_disk_path",
    )  # fmt: skip
    swap_space: float | None = setting(
        None, REAL, _GROUP, "GiB of host memory per rank: another way to write kv_offloading_size", low=0,
        after="kv_disk_size",
    )  # fmt: skip
    preemption_mode: str = setting(
        "auto", TEXT, _GROUP, "how preempted requests go on: pages that are in host memory are fetched (swap), computed again "
        "(recompute), or what is estimated to be faster (auto)", choices=("auto", "swap", "recompute"), after="swap_space",
    )  # fmt: skip


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "evicted pages that cannot be found",
        lambda c: host_bytes(c) > 0 and not c.prefix_caching,
        lambda c: (  # noqa: ARG005
            "kv_offloading_size requires enable_prefix_caching, by which pages in host memory are found. Enable it, or leave "
            "kv_offloading_size out"
        ),
    ),
    Conflict(
        "evicted pages of a model without any",
        lambda c: host_bytes(c) > 0 and not c.facts.layers and not c.facts.states,
        lambda c: f"kv_offloading_size is not supported with {c.facts.architecture}, which has no KV cache. Leave it out",
    ),
    Conflict(
        "pages on the disks of several machines",
        lambda c: c.args.kv_disk_path is not None and c.args.nnodes > 1,
        lambda c: f"kv_disk_path is not supported with nnodes={c.args.nnodes}: each machine has its own disk. Leave it out",
    ),
)  # fmt: skip


class Tiers(Feature):
    name = "tiers"
    conflicts = CONFLICTS
    part = "quire.features.tiers.device:TiersPart"
    cache_salt = None  # a record is found by the key of its page

    def check(self, args: Any) -> None:
        if args.swap_space and args.kv_offloading_size:
            raise ConfigError(
                f"swap_space {args.swap_space:g} and kv_offloading_size {args.kv_offloading_size:g} are two ways to write the "
                "same. Leave swap_space out"
            )
        if args.kv_disk_path is not None and not (args.swap_space or args.kv_offloading_size):
            raise ConfigError(
                "kv_disk_path requires kv_offloading_size, the memory through which pages go to disk and back. Add it"
            )
        if args.kv_disk_path is not None and (not args.kv_disk_path or "\0" in args.kv_disk_path):
            raise ConfigError(f"kv_disk_path must be a directory; got {args.kv_disk_path!r}. Give its path")
        if args.kv_disk_path is None and args.kv_disk_size != DEFAULT_DISK_GIB:
            raise ConfigError("kv_disk_size requires kv_disk_path, the directory that it bounds. Add it")
        if args.kv_offloading_eager and not (args.swap_space or args.kv_offloading_size):
            raise ConfigError("kv_offloading_eager requires kv_offloading_size, the memory that pages are stored in. Add it")
        if args.preemption_mode == "swap" and not (args.swap_space or args.kv_offloading_size):
            raise ConfigError("preemption_mode swap requires kv_offloading_size, the memory that pages are swapped to. Add it")

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        size = host_bytes(config)
        if not size:
            return None
        machine_bytes = size * (config.world // config.args.nnodes)
        reserved, disk = self.memory(config, Sizes()).reserved, disk_setting(config)
        return {
            "host_bytes": size, "machine_bytes": machine_bytes, "reserved": reserved, "buffers": store_buffers(config),
            "disk": disk,
        }  # fmt: skip

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        """Pages are staged on their way. On a CPU host memory is the device's memory."""
        size = host_bytes(config)
        if not size:
            return NO_MEMORY
        staged = min(size, max(STAGED_BYTES, _page_bytes(config), sizes.state))
        buffers = (store_buffers(config) + OTHER_BUFFERS) * staged
        return Memory(reserved=buffers + size * config.device_facts.one_memory)


@dataclass(frozen=True)
class DiskSetting:
    path: str
    bytes: int  # of one rank
    model: str  # what the content of pages depends on, besides their keys and the rank

    def fingerprint(self, share: str) -> str:
        """Return the name of the directory of a rank's share. The names of all shares of a model begin alike."""
        return "-".join(sha256(part.encode()).hexdigest()[:16] for part in (self.model, share))


def disk_setting(config: "Config") -> DiskSetting | None:
    """Return where pages are kept on disk; None: nowhere."""
    path, facts, args = config.args.kv_disk_path, config.facts, config.args
    if path is None:
        return None
    heads = [] if config.draft_head is None else [config.draft_head.facts.files]
    found = [file for files in (facts.files, *heads) for file in files.weights]
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in found]
    parts = (
        __version__, [identity(files) for files in (facts.files, *heads)], weights, facts.hf, args.load_format,
        config.seed if args.load_format == "dummy" else None, args.model_impl, config.device, config.dtype, config.cache_dtype,
        config.page_size, config.max_model_len, sorted(config.native_layouts), config.quantization, config.world,
    )  # fmt: skip
    return DiskSetting(path, int(args.kv_disk_size * GIB) // config.world, repr(parts))


def store_buffers(config: "Config") -> int:
    """Return how many buffers of STAGED_BYTES stored pages are copied to. A step that evicts more than they hold waits for
    the copies to host memory.
    """
    if config.device_facts.one_memory:
        return 1
    evicted = _page_bytes(config) * config.max_batched_tokens // config.page_size  # by the largest step
    most = int(MAX_STAGING_SHARE * config.device_facts.total_bytes) // STAGED_BYTES
    return max(2, min(evicted // STAGED_BYTES + 2, most))


def _page_bytes(config: "Config") -> int:
    """Return the bytes of a rank's page, about."""
    return sum(layer.page_bytes(config.page_size, config.cache_bytes) for layer in config.facts.layers) // config.world


def host_bytes(config: "Config") -> int:
    """Return the bytes of one rank's host tier; 0: there is none."""
    per_rank, total = config.args.swap_space, config.args.kv_offloading_size
    return int((per_rank or (total or 0.0) / config.world) * GIB)


def even_pages(config: "Config") -> float:
    """Return the pages of a sequence at which full attention takes as many operations as the model's matrices."""
    parts, layers = parameter_parts(config.facts.hf), sum(layer.window is None for layer in config.facts.layers)
    if not layers or not parts.query_width:
        return float("inf")
    active = parts.dense + parts.expert * min(parts.experts, parts.experts_per_token)
    return active / (layers * parts.query_width * config.page_size)  # the mean position is half the length
