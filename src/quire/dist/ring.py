"""What joins the ranks of a pipeline: within a stage they meet, and from stage to stage they hand on.

    memory    [ stage 0's meetings | stage 1's | ... | rank 0's hidden states | rank 1's | ... ]
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.dist.channel import Ends, Neighbours, Shape
from quire.dist.collectives import Group
from quire.dist.mesh import Position
from quire.dist.nodes import NodesGroup
from quire.dist.shared_memory import SharedMemoryGroup, Watch, meeting_size
from quire.dist.stages import Seat


@dataclass(frozen=True)
class Ring:
    """One rank's ends of it."""

    seat: Seat
    group: Group | None  # None = it has its stage alone
    ends: Ends
    others: Sequence[int]  # ranks of other stages


class Joints(Protocol):
    """A device, as far as it joins ranks of one node."""

    def group(
        self, position: Position, memory: int, peers: Mapping[int, socket.socket], watch: Watch, offset: int = 0
    ) -> SharedMemoryGroup: ...

    def channel(self, shape: Shape, neighbours: Neighbours, watch: Watch) -> Ends: ...


def join_ring(
    device: Joints,
    seat: Seat,
    shape: Shape,
    memory: int,
    peers: Mapping[int, socket.socket],
    watch: Watch,
    remote: Mapping[int, socket.socket],
) -> Ring:
    """memory: a file of any size. peers: a connection to every other rank of this node; remote: of other nodes."""
    size, stages = seat.position.size, len(seat.stage.layers)
    meeting = meeting_size(size) if size > 1 else 0
    os.ftruncate(memory, stages * meeting + seat.world * shape.size)  # whoever comes first
    group: Group | None = None
    if size > 1:
        mates = {rank: peers[rank] for rank in seat.together if rank in peers}
        far = {rank: remote[rank] for rank in seat.together if rank in remote}
        offset = seat.stage.index * meeting
        if far:
            group = NodesGroup(seat.position, memory, mates, watch, far, offset, seat.together.start)
        else:
            group = device.group(seat.position, memory, mates, watch, offset)

    def place(sender: int) -> int:
        return stages * meeting + sender * shape.size

    neighbours = Neighbours(seat.rank, seat.before, seat.behind, peers, remote, memory, place)
    ends = device.channel(shape, neighbours, watch)
    return Ring(seat, group, ends, [rank for rank in range(seat.world) if rank not in seat.together])
