"""The ranks of a pipeline: each stage has some of the model's layers and sends hidden states to the next stage.

    ranks of tensor_parallel_size=2, pipeline_parallel_size=3

    stage 0    0    1          every stage has two ranks,
    stage 1    2    3          and each sends its hidden states to the rank
    stage 2    4    5          at the same position of the next stage

The ring is closed: the last stage sends to the first, which has the embedding and the LM head. Ranks of a stage add their
partial sums.

    shared memory of a node    [ stage 0's sums | stage 1's | ... | rank 0's hidden states | rank 1's | ... ]
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.dist.channel import Ends, Neighbours, Shape
from quire.dist.collectives import RankGroup
from quire.dist.mesh import Position
from quire.dist.shared_memory import PeerWatch, group_bytes


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline."""

    index: int
    layers: tuple[range, ...]  # of every stage

    @property
    def own(self) -> range:
        return self.layers[self.index]

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == len(self.layers) - 1


@dataclass(frozen=True)
class PipelineRank:
    """A rank of the pipeline."""

    stage: Stage
    position: Position  # among those of its stage

    @classmethod
    def of(cls, rank: int, layers: tuple[range, ...], size: int, expert_parallel: bool = False) -> "PipelineRank":
        """Return the rank with this number. layers: of every stage; size: ranks per stage."""
        stage, rank_of_stage = divmod(rank, size)
        return cls(Stage(stage, layers), Position(rank_of_stage, size, expert_parallel))

    @property
    def rank(self) -> int:
        return self.stage.index * self.position.size + self.position.rank

    @property
    def world(self) -> int:
        """Return the number of ranks of all stages."""
        return len(self.stage.layers) * self.position.size

    @property
    def stage_ranks(self) -> range:
        """Return the ranks of its stage."""
        return range(self.rank - self.position.rank, self.rank - self.position.rank + self.position.size)

    @property
    def previous_rank(self) -> int:
        """Return the rank that sends it hidden states."""
        return self._neighbour(-1)

    @property
    def next_rank(self) -> int:
        """Return the rank to which it sends hidden states."""
        return self._neighbour(1)

    def _neighbour(self, step: int) -> int:
        return (self.stage.index + step) % len(self.stage.layers) * self.position.size + self.position.rank


@dataclass(frozen=True)
class Ring:
    """The connections of one rank."""

    own: PipelineRank
    group: RankGroup | None  # None: its stage has one rank
    ends: Ends
    others: Sequence[int]  # ranks of other stages


class Joints(Protocol):
    """What a device provides to connect ranks of one node."""

    def group(
        self,
        position: Position,
        memory: int,
        peers: Mapping[int, socket.socket],
        watch: PeerWatch,
        offset: int = 0,
        remote: Mapping[int, socket.socket] | None = None,
        first: int = 0,
    ) -> RankGroup: ...

    def channel(self, shape: Shape, neighbours: Neighbours, watch: PeerWatch) -> Ends: ...


def join_ring(
    device: Joints,
    own: PipelineRank,
    shape: Shape,
    memory: int,
    peers: Mapping[int, socket.socket],
    watch: PeerWatch,
    remote: Mapping[int, socket.socket],
) -> Ring:
    """Connect a rank to its group and its neighbours.

    memory: descriptor of a file of any size.
    peers, remote: a connection to every other rank of this node, and of other nodes.
    """
    size, stages = own.position.size, len(own.stage.layers)
    exchange = group_bytes(size) if size > 1 else 0
    os.ftruncate(memory, stages * exchange + own.world * shape.size)  # by the first rank
    group: RankGroup | None = None
    if size > 1:
        mates = {rank: peers[rank] for rank in own.stage_ranks if rank in peers}
        far = {rank: remote[rank] for rank in own.stage_ranks if rank in remote}
        group = device.group(own.position, memory, mates, watch, own.stage.index * exchange, far, own.stage_ranks.start)

    def offset_of(sender: int) -> int:
        return stages * exchange + sender * shape.size

    neighbours = Neighbours(own.rank, own.previous_rank, own.next_rank, peers, remote, memory, offset_of)
    ends = device.channel(shape, neighbours, watch)
    return Ring(own, group, ends, [rank for rank in range(own.world) if rank not in own.stage_ranks])
