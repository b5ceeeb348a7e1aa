"""Collectives of ranks on several nodes that may share a GPU, for tests: through host memory and TCP, as on CPUs."""

from collections.abc import Sequence

from torch import Tensor

from quire.dist.shared_memory import NodesGroup


class HostNodesGroup(NodesGroup):
    """The host waits for its GPU in every collective."""

    def _exchange(self, chunk: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        return [part.to(chunk.device) for part in self._publish(chunk.cpu(), lengths)]
