"""The device half of a feature: a `StepPart`, which the runner calls at fixed moments of a step.

    start      transform (model without weights) → load (weights are there) → check_prepared → warm_up → allocate (cache, slots)
    each step  retire, admit → prepare → arrange → extend or graph_key → after_layers → finish
    end        close

The runner names no feature: it loops over its parts in the order of `config/features.py`. A feature that is off has no part and
costs nothing. This module does not import torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.types.plan import Admission, Ints, Longs, StepPlan, StepRows

if TYPE_CHECKING:
    from torch import Tensor

    from quire.attn.batch import Batch
    from quire.device.base import Prepared, Recorder
    from quire.models.decoder import Decoder
    from quire.runner.sampler.pipeline import Sampler
    from quire.runner.slots import Slots


class PageMemory(Protocol):
    """The KV cache's pages as bytes."""

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page, in all buffers together."""

    def gather(self, pages: Ints, out: "Tensor") -> None:
        """Copy these pages to out [pages, page_bytes] uint8."""

    def scatter(self, pages: Ints, content: "Tensor") -> None:
        """Overwrite these pages. content: [pages, page_bytes] uint8"""


@dataclass(frozen=True)
class Allocation:
    """The memory of a runner's slots. Parts have their own per-slot state."""

    pages: int  # usable KV cache pages; 0: a profile or warm-up run, whose results do not matter
    snapshots: int  # entries for saved recurrent states
    slots: "Slots"
    sampler: "Sampler"
    recorder: "Callable[[], Recorder] | None"  # None: no CUDA graphs are recorded
    memory: PageMemory | None = None  # the pages
    others: "list[PageMemory]" = field(default_factory=list)  # of parts: their pages have the same numbers and move with them
    share: str = ""  # names this rank's share of the model, among all shares
    snapshot_records: int = 1  # records of the host tier that a snapshot takes


@dataclass(frozen=True)
class FinishedStep:
    """A step whose rows have been launched."""

    plan: StepPlan
    rows: StepRows  # as they were run, see `StepPart.arrange`
    hidden: "Tensor | None"  # [kept tokens, hidden_size]; None: a CUDA graph was replayed
    sampled_from: "Tensor | None"  # [samples, hidden_size]; None: a CUDA graph was replayed


@dataclass(frozen=True)
class Pooled:
    """Values that were pooled of a step's rows."""

    counts: dict[int, int]  # row -> its rows in `values`, in their order
    values: "Tensor"  # [sum of counts, size] float32


class StepFollower(Protocol):
    """Work that goes on when the tokens of a step have reached the host."""

    def follow(self, plan: StepPlan, lengths: Ints) -> None:
        """lengths [R]: tokens that each row brought."""

    def drafts_of(self, plan: StepPlan) -> Ints:
        """Return the draft tokens [sum of drafts] that the rows of `plan` ran with."""

    def expects(self, slot: int, count: int) -> Ints:
        """Return the `count` draft tokens after the text of `slot`."""


class StepPart(ABC):
    """The device half of a feature. Every hook but `graph_key` has a default that does nothing."""

    name: str  # of the feature
    reads_layers = False  # it reads hidden states between layers, so the device must run them one by one
    reads_all_tokens = False  # it reads the final hidden states of all tokens of a step
    graph_keys: Sequence[Hashable] = (False,)  # every key that `graph_key` can return, False first
    replays_states = False  # graphs end with the hidden states of all tokens, which the part pools: no step draws
    samples_on_one_rank = False  # ranks with the same logits may sample other tokens, so only the first one samples
    moves_pages = False  # it copies whole pages, so these should be contiguous memory over all layers
    single_tokens = False  # only steps whose rows have one token each can be recorded

    def before_cut(self, model: "Decoder") -> None:
        """Read or change the whole model, on the meta device, before a pipeline stage takes its layers out of it."""

    def transform(self, model: "Decoder") -> None:
        """Change this rank's share of the model, on the meta device, before its weights are loaded."""

    def load(self, model: "Decoder", reserved_bytes: Callable[[], int]) -> None:
        """Load what belongs to the feature. The weights of `model` are there; the device has not prepared it yet.

        reserved_bytes: what all parts and CUDA graphs together will take, valid when every part is loaded.
        """

    def check_prepared(self, prepared: "Prepared") -> None:
        """Raise a `ConfigError` if the part cannot work with what the device made of the model."""

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:
        """Return bytes of device memory that the part takes after the profile run."""
        return 0

    def warm_up(self, max_tokens: int) -> None:
        """Compile or load kernels that the warm-up steps do not run."""

    def allocate(self, allocation: Allocation) -> None:
        """Make the per-slot state. Called again with another allocation after a profile or warm-up run."""

    def admit(self, slot: int, admission: Admission) -> None:
        """Take in a new request. Its slot was retired before."""

    def retire(self, slot: int) -> None:
        """Forget the slot's request; the slot may be free already."""

    def prepare(self, plan: StepPlan) -> None:
        """Act on the rest of a plan (copied pages, loaded states) before its rows are built. The plan may have no rows."""

    def complete(self, plan: StepPlan) -> StepPlan:
        """Fill in what only this process knows of the plan, before it goes to other ranks."""
        return plan

    def arrange(
        self,
        plan: StepPlan,
        run: Callable[[StepRows], None],
    ) -> tuple[StepRows, Longs | None] | None:
        """Return other rows to run in place of the plan's, and [rows] the plan's row of each (None: the same). None: no change.

        run: runs rows through the model before the step, without outputs.
        """
        return None

    def extend(self, batch: "Batch", rows: StepRows, slot: "Tensor") -> "Batch":
        """Return the batch with the feature's arrays. slot [R] int64, on the device. All tokens are still in the batch."""
        return batch

    @abstractmethod
    def graph_key(self, rows: StepRows) -> Hashable | None:
        """Return which CUDA graphs can run these rows: steps with different keys have graphs of their own.

        False: these rows do not use the feature. None: no graph can run them, so the step is run eagerly.
        """

    def pool(self, rows: StepRows, hidden: "Tensor", index: Longs) -> Sequence[Pooled] | None:
        """Pool the hidden states of `rows.outputs.pool`. None: this is another part's task.

        hidden: [kept tokens, hidden_size]. index: [pool] where in it the states of these tokens are.
        """
        return None

    def failed(self, plan: StepPlan) -> Mapping[int, str]:
        """Return the rows of a launched plan whose requests fail, and why. The other rows are valid."""
        return {}

    def after_layers(self, plan: StepPlan) -> None:
        """Keep what the plan's rows left in this rank's layers, before the next step runs. In a pipeline, every stage calls it
        when its layers have run; `finish` is for the stage that samples."""

    def finish(self, step: FinishedStep) -> StepFollower | None:
        """Read what the step left. Return a Follower if work goes on when its tokens have reached the host."""
        return None

    def idle(self) -> bool:
        """Use a moment without requests. Return False if there is nothing left to do."""
        return False

    def check(self) -> None:
        """Raise EngineDead if other processes that the part needs are lost."""

    def describe(self) -> dict[str, int]:
        """Return counts for the description of this rank."""
        return {}

    def close(self) -> None:
        """Give back memory and connections."""

    # ---- CUDA graphs: inputs at fixed addresses, and what is read after a replay -----------------------------------------

    def allocate_inputs(self, slots: "Slots", max_rows: int) -> None:
        """Allocate the graph inputs, shared by all graphs."""

    def write_inputs(self, rows: StepRows | None, count: int) -> None:
        """Write the inputs of a graph of `count` rows. None: all of its rows are padding. Only for keys that are true."""

    def extend_recorded(self, batch: "Batch", count: int) -> "Batch":
        """As `extend`, from the graph inputs. This is recorded. Only for keys that are true."""
        return batch

    def keep_states(self, hidden: "Tensor", tokens: int) -> None:
        """Keep what is read after the replay; hidden [kept tokens, hidden_size] of `tokens` tokens. This is recorded."""
