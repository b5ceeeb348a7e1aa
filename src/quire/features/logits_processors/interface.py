"""The interface of logits processors: vLLM's. Nothing here imports torch."""

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quire.types.errors import PLUGIN_FAILURES
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
# (output ids, logits of the row) or (prompt ids, output ids, logits of the row) -> logits of the row
RequestLogitsProcessor = Callable[..., "Tensor"]


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = 0  # the request at the first index goes to the second one, and leaves nothing behind
    SWAP = 1  # the requests at both indices change places


RemovedRequest = int
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the batch since the last step, to be applied in the order removed, added, moved.

    Added and moved requests may take the index of a request that is gone.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]  # indices
    added: Sequence[AddedRequest]  # (index, params, prompt ids, output ids); the list of output ids grows with the output
    moved: Sequence[MovedRequest]  # (index, index, direction)


class LogitsProcessor(ABC):
    """Changes the logits of a batch. Row i of the logits belongs to the request at index i."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request whose parameters are wrong, so that it is refused."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: "torch.device", is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: "Tensor") -> "Tensor":
        """Return changed logits [batch, vocabulary]; they may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the processor never changes which token of a row is the most likely."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take in the changes of the batch, before `apply`. None: there are none."""


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Keep the states of requests, by index, up to date; return whether one has changed.

    new_state: returns the state of an added request; None: it needs none.
    """
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= req_entries.pop(index, None) is not None
    for index, params, prompt_ids, output_ids in batch_update.added:
        changed |= req_entries.pop(index, None) is not None
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            req_entries[index] = state
            changed = True
    for first, second, direction in batch_update.moved:
        source, target = req_entries.pop(first, None), req_entries.pop(second, None)
        if source is not None:
            req_entries[second] = source
        if target is not None and direction is MoveDirectionality.SWAP:
            req_entries[first] = target
        changed |= source is not None or target is not None
    return changed


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a processor of callables that each see one request. A callable that fails ends its own request only."""

    failures: dict[int, BaseException] | None = None  # index -> why the request cannot go on; taken by the sampler
    present: Collection[int] | None = None  # the requests that get a token in this step; None: all

    def __init__(self, vllm_config: Any, device: "torch.device", is_pin_memory: bool) -> None:  # noqa: ARG002
        self.req_info: dict[int, partial[Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable of a new request; None: its logits stay as they are."""

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> "partial[Tensor] | None":
        if (processor := self.new_req_logits_processor(params)) is None:
            return None
        whole = len(inspect.signature(processor).parameters) == 3
        return partial(processor, prompt_ids, output_ids) if whole else partial(processor, output_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        failed: dict[int, BaseException] = {}
        ids = iter([index for index, *_ in batch_update.added])

        def make(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> "partial[Tensor] | None":
            index = next(ids)
            try:
                return self._new_state(params, prompt_ids, output_ids)
            except PLUGIN_FAILURES as error:
                failed[index] = error
                return None

        process_dict_updates(self.req_info, batch_update, make)
        for first, second, _ in batch_update.moved:
            if first in failed:
                failed[second] = failed.pop(first)
        self.failures = {**(self.failures or {}), **failed}

    def apply(self, logits: "Tensor") -> "Tensor":
        for index, processor in self.req_info.items():
            if self.present is not None and index not in self.present:
                continue
            try:
                row = processor(logits[index])
                if row.shape != logits.shape[1:]:
                    raise ValueError(f"it must return logits of shape {list(logits.shape[1:])}; got {list(row.shape)}")
                logits[index] = row
            except PLUGIN_FAILURES as error:
                self.failures = {**(self.failures or {}), index: error}
        return logits
