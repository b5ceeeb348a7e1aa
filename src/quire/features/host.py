"""The host half of a feature: conflicts, memory and what its cached keys depend on. Nothing here imports torch.

`quire.config.features` lists all of them. A feature that is off returns `NO_MEMORY` and no salt, and costs nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config
    from quire.config.facts import ModelFacts


@dataclass(frozen=True)
class Conflict:
    """Settings that are not supported together, and the error that names what to change."""

    name: str
    applies: "Callable[[Config], bool]"
    message: "Callable[[Config], str]"
    # which kind of model is refused, and what users call the setting (docs/models.md lists both); "": any model
    of: Literal["", "shared blocks", "by transformers"] = ""
    what: str = ""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank, in bytes where no other unit is given. `quire plan` reads them from file headers or a model without
    weights, the engine from the loaded model."""

    weights: int = 0  # of the model
    adapter: int = 0  # of one LoRA adapter of max_lora_rank that changes every linear layer
    linear_values: int = 0  # weights in unquantized linear layers
    copied_values: int = 0  # weights in quantized matrices that can have a dequantized copy
    expert: int = 0  # of one expert in all layers
    draft_weights: int = 0
    draft_step: int = 0  # activations of the draft model's largest step
    draft_page: int = 0  # of the draft model's cache, for each page of the model's
    draft_cache: int = 0  # of a draft model with another vocabulary, which has a cache of its own
    state: int = 0  # recurrent states of one sequence


@dataclass(frozen=True)
class Memory:
    """Bytes that a feature takes on the device of one rank, beside the model's weights. No byte is counted in two fields."""

    weights: int = 0  # allocated while the model is loaded; below 0: weights that the feature leaves to other ranks
    optional: int = 0  # allocated after that if the rule of `DequantizedCopies` finds room
    reserved: int = 0  # kept free by the memory profile and allocated after it
    step: int = 0  # peak of work that follows the model's own step
    per_page: int = 0  # of the cache's memory, beside each page
    per_slot: int = 0  # of the cache's memory, for each of max_num_seqs requests


NO_MEMORY = Memory()


class Feature(ABC):
    name: ClassVar[str]
    conflicts: Sequence[Conflict] = ()
    part: ClassVar[str] = ""  # "module:class" of the device half, imported where torch is; "": the engine makes it, or none

    def check(self, args: Any) -> None:  # noqa: B027
        """Raise ConfigError if the feature's arguments contradict each other. args: EngineArgs, changed in place."""

    def resolve(self, args: Any, facts: "ModelFacts") -> Any:  # noqa: ARG002
        """Return what the feature makes of arguments and model, for `Config.features`; None: it is off or has no such value."""
        return None

    def part_options(self, config: "Config") -> dict[str, Any] | None:  # noqa: ARG002
        """Return the arguments of `part` after the device and the dtype; None: the feature is off."""
        return None

    @abstractmethod
    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        """Return what the feature takes on one rank. `quire plan`, `quire simulate` and the engine read this figure."""

    @property
    @abstractmethod
    def cache_salt(self) -> Callable[[Extras], tuple[str, ...]] | None:
        """What a request's cached keys and values depend on besides its tokens: a function of its extras, whose result enters
        the prefix-cache key. None: they do not depend on the feature.
        """
