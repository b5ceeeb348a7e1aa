"""The requests of the sampler as vLLM's persistent batch: dense indices, and the changes from step to step."""

from dataclasses import dataclass

from quire.features.logits_processors.interface import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest
from quire.types.sampling import SamplingParams


@dataclass
class BatchRequest:
    params: SamplingParams
    prompt: list[int]
    output: list[int]  # grows in place: processors keep a reference

    def added(self, index: int) -> AddedRequest:
        return index, self.params, self.prompt, self.output


class PersistentBatch:
    """A request gets an index when it first samples, and keeps it until it leaves or fills the gap of another one."""

    def __init__(self) -> None:
        self.requests: dict[int, BatchRequest] = {}  # by slot, those that have not sampled yet among them
        self.index: dict[int, int] = {}  # slot -> index in the batch
        self._gaps: list[int] = []  # indices of requests that left

    def admit(self, slot: int, request: BatchRequest) -> None:
        self.retire(slot)
        self.requests[slot] = request

    def retire(self, slot: int) -> None:
        self.requests.pop(slot, None)
        if (index := self.index.pop(slot, None)) is not None:
            self._gaps.append(index)

    def update(self, slots: list[int]) -> BatchUpdate | None:
        """Take in the slots that sample, and return the changes since the last call."""
        new = [slot for slot in slots if slot not in self.index]
        if not new and not self._gaps:
            return None
        size, gaps, added = len(self.index) + len(self._gaps), sorted(self._gaps), list[AddedRequest]()
        for slot in new:
            at = gaps.pop(0) if gaps else size
            size = max(size, at + 1)
            self.index[slot] = at
            added.append(self.requests[slot].added(at))
        moved, gaps = self._fill(gaps, size)
        self._gaps = []
        return BatchUpdate(len(self.index), gaps, added, moved)

    def _fill(self, gaps: list[int], size: int) -> tuple[list[MovedRequest], list[int]]:
        """Move the last requests to the first gaps; return the moves, and the gaps that are left at the end."""
        slot_at, moved, count = {at: slot for slot, at in self.index.items()}, list[MovedRequest](), len(self.index)
        sources = [at for at in range(size - 1, count - 1, -1) if at in slot_at]
        targets = [gap for gap in gaps if gap < count]
        for source, target in zip(sources, targets, strict=True):
            self.index[slot_at[source]] = target
            moved.append((source, target, MoveDirectionality.UNIDIRECTIONAL))
        return moved, [gap for gap in gaps if gap >= count]
