"""Where a rank stands in a pipeline: its stage has some of the model's layers, one behind the other.

    ranks of tensor_parallel_size=2, pipeline_parallel_size=3

    stage 0    0    1          every stage is divided among two ranks,
    stage 1    2    3          and each sends what it has to the rank
    stage 2    4    5          at its place in the next stage

The ring is closed: what comes out of the last stage goes back to the first, which has the embedding and the head.
"""

from dataclasses import dataclass

from quire.dist.mesh import Position


@dataclass(frozen=True)
class Stage:
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
class Seat:
    """One of all ranks."""

    stage: Stage
    position: Position  # among those of its stage

    @classmethod
    def of(cls, rank: int, layers: tuple[range, ...], size: int, expert_parallel: bool = False) -> "Seat":
        """`layers`: of every stage, each of which `size` ranks have together."""
        stage, place = divmod(rank, size)
        return cls(Stage(stage, layers), Position(place, size, expert_parallel))

    @property
    def rank(self) -> int:
        return self.stage.index * self.position.size + self.position.rank

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.stage.layers) * self.position.size

    @property
    def together(self) -> range:
        """The ranks of its stage."""
        return range(self.rank - self.position.rank, self.rank - self.position.rank + self.position.size)

    @property
    def before(self) -> int:
        """The rank from which it gets hidden states."""
        return self._beside(-1)

    @property
    def behind(self) -> int:
        """The rank to which it sends them."""
        return self._beside(1)

    def _beside(self, step: int) -> int:
        return (self.stage.index + step) % len(self.stage.layers) * self.position.size + self.position.rank
