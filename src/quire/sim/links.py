"""The links between GPUs, and how long a collective takes on them, from published measurements.

    one-shot    each rank reads all parts and adds them:           start + (n - 1) x bytes / direct
    two-shot    reduce-scatter and all-gather, NCCL, multicast:    start + 2 (n - 1) / n x bytes / bus
    nodes       reduce-scatter in each node, all-reduce of a part between nodes, all-gather in each node

Of one-shot and two-shot, the faster one is used. Collectives are recorded in CUDA graphs, so the host adds nothing;
`HOST_SUM_S` is the time of a sum that goes through the hosts.

Sources. `tests/sim/test_links.py` compares the formulas with the measurements in [1] to [6]; what is not measured is assumed to
behave as the link before it.

    peak     NVIDIA data sheets of A100, H100 and B200: 600, 900 and 1,800 GB/s per GPU in both directions together; PCI-SIG:
             31.5 and 63 GB/s per direction of 16 lanes; InfiniBand HDR and NDR: 200 and 400 Gb/s per port
    [1]      github.com/vllm-project/vllm/pull/24111, 24532, 42324: all-reduce on H100, 2 to 8 GPUs, 0.5 to 128 MiB
    [2]      github.com/vllm-project/vllm/pull/37756: all-reduce on B300, 8 GPUs, 16 KiB to 128 MiB
    [3]      github.com/sgl-project/sglang/pull/2904: one-shot all-reduce on H100, 512 bytes to 1 MiB
    [4]      github.com/NVIDIA/nccl/issues/1455: bus bandwidth of H100, 365 to 480 GB/s
    [5]      github.com/NVIDIA/Megatron-LM/pull/5596: all-gather on 8 H100, 2 to 128 MiB
    [6]      github.com/NVIDIA/nccl/issues/1244: all-reduce of 16 H20 on two nodes with NDR, 47 us for few bytes
    [7]      github.com/NVIDIA/nccl-tests/issues/123: NCCL's ring on 2 to 8 A100, 10 to 34 us for few bytes on one channel
    [8]      github.com/NVIDIA/nccl/issues/1530, 1639: 8 RTX 4090, 42 us for few bytes; 4 and 8 RTX 5090, 35 and 28 GB/s
    [9]      README of github.com/deepseek-ai/DeepEP: 43 to 47 GB/s of an NDR port's 50 in all-to-all between nodes
"""

from dataclasses import dataclass
from math import inf, log2

from quire.types.errors import ConfigError

HOST_SUM_S = 152e-6  # a sum of 64 KB between two ranks on one H200, exchanged through the hosts; measured
NODE_CARDS = 8
MICROSECOND, GB = 1e-6, 1e9


@dataclass(frozen=True)
class Link:
    """The links between the GPUs of a node. Bandwidths in bytes per second, in one direction, as reached in practice."""

    name: str
    bus: float  # of reduce-scatter and all-gather
    bus_start: float  # seconds of a two-shot collective without data
    bus_hop: float  # and in addition for each other rank
    direct: float = 0.0  # of reading from all other GPUs; 0: one-shot is not used
    direct_start: float = 0.0
    direct_hop: float = 0.0


@dataclass(frozen=True)
class Network:
    """The network between nodes, with a port for each GPU."""

    name: str
    bandwidth: float  # bytes per second and GPU, in one direction
    hop: float  # seconds of a message


LINKS = {
    link.name: link
    for link in (
        Link("nvlink3", 235 * GB, 15 * MICROSECOND, 0.0, 250 * GB, 6 * MICROSECOND, 0.25 * MICROSECOND),  # [7]; bus: as nvlink4
        Link("nvlink4", 365 * GB, 10 * MICROSECOND, 0.0, 380 * GB, 5 * MICROSECOND, 0.25 * MICROSECOND),  # [1] [3] [4] [5]
        Link("nvlink5", 580 * GB, 13 * MICROSECOND, 0.0, 760 * GB, 5 * MICROSECOND, 0.25 * MICROSECOND),  # [2]
        Link("pcie4", 16 * GB, 0.0, 6 * MICROSECOND),  # [8]; bus: as pcie5's share of the peak
        Link("pcie5", 32 * GB, 0.0, 6 * MICROSECOND),  # [8]
    )
}
HOST_LINKS = {"pcie3": 12 * GB, "pcie4": 25 * GB, "pcie5": 52 * GB}  # to host memory, in one direction; about 80 % of the peak
MEMORY_BANDWIDTH = 10 * GB  # of copies within host memory on a CPU
DISK_BANDWIDTH = 3 * GB
NO_LINK = Link("no link", inf, 0.0, 0.0)  # of a GPU alone
NETWORKS = {
    network.name: network
    for network in (
        Network("hdr", 22 * GB, 13 * MICROSECOND),  # as ndr
        Network("ndr", 45 * GB, 13 * MICROSECOND),  # [6] [9]
    )
}


@dataclass(frozen=True)
class Span:
    """A group of ranks: how many, on how many nodes."""

    ranks: int
    nodes: int = 1

    @property
    def per_node(self) -> int:
        return max(1, self.ranks // self.nodes)


@dataclass(frozen=True)
class Fabric:
    """All links between the GPUs of an engine. Times are in seconds, sizes in bytes."""

    link: Link
    network: Network | None = None  # None: all are on one node
    cards: int = NODE_CARDS  # of a node

    @property
    def name(self) -> str:
        return self.link.name if self.network is None else f"{self.link.name} and {self.network.name}"

    def span(self, ranks: int) -> Span:
        """Return the group of `ranks` neighbouring ranks, which fill nodes."""
        return Span(ranks, -(-ranks // self.cards))

    def all_reduce(self, size: float, span: Span) -> float:
        """size: of each rank's part."""
        if span.ranks == 1:
            return 0.0
        local, link = span.per_node, self.link
        two_shot = link.bus_start + link.bus_hop * (local - 1) + 2 * (local - 1) / local * size / link.bus if local > 1 else 0.0
        if span.nodes > 1:
            network, nodes = self._network, span.nodes
            between = 2 * (nodes - 1) / nodes * size / local / network.bandwidth
            return two_shot + 2 * log2(nodes) * network.hop + between
        if not link.direct:
            return two_shot
        return min(two_shot, link.direct_start + link.direct_hop * local + (local - 1) * size / link.direct)

    def all_gather(self, size: float, span: Span) -> float:
        """size: of all parts together."""
        if span.ranks == 1:
            return 0.0
        seconds = self._start(span)
        if span.per_node > 1:
            seconds += (span.per_node - 1) / span.per_node * size / self.link.bus
        if span.nodes > 1:
            seconds += (span.nodes - 1) / span.nodes * size / span.per_node / self._network.bandwidth
        return seconds

    def all_to_all(self, size: float, span: Span) -> float:
        """size: what each rank sends to all together, also to itself."""
        if span.ranks == 1:
            return 0.0
        near = (span.per_node - 1) / span.ranks * size / self.link.bus
        if span.nodes == 1:
            return self._start(span) + near
        far = (span.ranks - span.per_node) / span.ranks * size / self._network.bandwidth
        return self._start(span) + max(near, far)

    def send(self, size: float, between_nodes: bool) -> float:
        if between_nodes:
            return self._network.hop + size / self._network.bandwidth
        return self._start(Span(2)) + size / self.link.bus

    @property
    def _network(self) -> Network:
        assert self.network is not None
        return self.network

    def _start(self, span: Span) -> float:
        """Return the time of moving few bytes once between all ranks."""
        link, local = self.link, span.per_node
        seconds = self._network.hop * log2(span.nodes) if span.nodes > 1 else 0.0
        if local > 1:
            seconds += link.direct_start + link.direct_hop * local if link.direct else link.bus_hop * (local - 1) / 2
        return seconds


def make_fabric(cards: int, link: str | None, network: str | None, name: str) -> Fabric:
    """Return the links between `cards` GPUs. name: of the GPU, for errors; link and network: None if unknown."""
    for flag, given, known in (("link", link, LINKS), ("network", network, NETWORKS)):
        if given is not None and given not in known:
            raise ConfigError(f"--{flag} must be one of {', '.join(known)}; got {given}")
    if cards == 1:
        return Fabric(NO_LINK)
    if link is None:
        raise ConfigError(f"--link is required for {name}; use one of {', '.join(LINKS)}")
    if cards <= NODE_CARDS:
        return Fabric(LINKS[link])
    if network is None:
        raise ConfigError(f"--network is required for {cards} {name} on several nodes; use one of {', '.join(NETWORKS)}")
    return Fabric(LINKS[link], NETWORKS[network])
