"""Pooling requests: the parameters that users set, how a request is pooled once they are resolved, and the outputs.

A pooling request returns vectors instead of tokens: an embedding, class probabilities, a score. Nothing here imports torch.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, get_args

from quire.types.adapter import LoRARequest
from quire.types.checks import check_flag, check_ids, check_int
from quire.types.errors import EngineError, InvalidParameter, RequestError

if TYPE_CHECKING:
    from quire.types.plan import Floats

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
IO_PROCESSOR_TASK = "plugin"  # vLLM's task of IO processors; here the model's first task
PoolingType = Literal["LAST", "CLS", "MEAN", "ALL", "STEP"]
POOLING_TYPES: tuple[PoolingType, ...] = get_args(PoolingType)

# why a request ended whose values are not finite
NOT_FINITE = (
    "the model's values for it are NaN or infinite. Start the engine with dtype=float32, which cannot overflow as 16 bits do; "
    "if that changes nothing, the weights are damaged: download them again"
)


@dataclass
class PoolingParams:
    """vLLM's fields and defaults. None: what the model's files or `pooler_config` say."""

    truncate_prompt_tokens: int | None = None  # most prompt tokens; -1: as many as fit
    dimensions: int | None = None  # of an embedding: how many of its values are kept (Matryoshka)
    normalize: bool | None = None  # older name of use_activation for embeddings
    use_activation: bool | None = None  # normalize embeddings, apply softmax or sigmoid to class scores
    task: PoolingTask | None = None
    step_tag_id: int | None = None  # token_classify: return the scores after this token only
    returned_token_ids: list[int] | None = None  # token_classify: return these classes only
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    prompt_name: str | None = None  # not vLLM's: the prompt of sentence-transformers' files before a text; "": none

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, low=-1)
            if self.truncate_prompt_tokens == 0:
                raise InvalidParameter(
                    "truncate_prompt_tokens must be at least 1, or -1 for as many as fit; got 0", "truncate_prompt_tokens"
                )
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, low=1)
        for name in ("normalize", "use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.normalize is not None and self.use_activation not in (None, self.normalize):
            raise InvalidParameter("normalize and use_activation contradict each other. Set use_activation only", "normalize")
        if self.task is not None and self.task not in (*POOLING_TASKS, IO_PROCESSOR_TASK):
            raise InvalidParameter(f"task must be one of {', '.join(POOLING_TASKS)}; got {self.task!r}", "task")
        if self.step_tag_id is not None:
            check_int("step_tag_id", self.step_tag_id, low=0)
        if self.returned_token_ids is not None:
            check_ids("returned_token_ids", self.returned_token_ids)
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise InvalidParameter(
                f"prompt_name must be the name of a prompt, or empty for no prompt; got {self.prompt_name!r}", "prompt_name"
            )
        if self.extra_kwargs:
            raise InvalidParameter(
                f"extra_kwargs is not supported, since no plug-in reads it; got {self.extra_kwargs!r}. Remove it",
                "extra_kwargs",
            )

    @property
    def activates(self) -> bool | None:
        """Whether normalization, softmax or sigmoid is wanted; None: the model's default."""
        return self.normalize if self.use_activation is None else self.use_activation

    def clone(self) -> "PoolingParams":
        return PoolingParams(**{one.name: getattr(self, one.name) for one in fields(self)})


@dataclass(frozen=True)
class Pooling:
    """How one request is pooled: its parameters after the model's defaults. It travels with the request to the device."""

    task: PoolingTask
    type: PoolingType
    activate: bool = True
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None

    @property
    def reads_all(self) -> bool:
        """Whether the hidden states of all prompt tokens are needed, so that no cached prefix can be used."""
        return self.type != "LAST"

    @property
    def per_token(self) -> bool:
        """Whether the result has a row for each token rather than for the prompt."""
        return self.type in ("ALL", "STEP")


@dataclass
class PoolingOutput:
    """data: float32, [values], or [tokens, values] of token_embed and token_classify."""

    data: "Floats"


def _one_vector(output: PoolingOutput, name: str) -> list[float]:
    if output.data.ndim != 1:
        raise RequestError(f"{name} must be one vector; got values of shape {list(output.data.shape)}")
    values: list[float] = output.data.tolist()
    return values


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> "EmbeddingOutput":
        return cls(_one_vector(output, "an embedding"))

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> "ClassificationOutput":
        return cls(_one_vector(output, "class probabilities"))

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> "ScoringOutput":
        if output.data.size != 1:
            raise RequestError(f"a score must be one value; got values of shape {list(output.data.shape)}")
        return cls(float(output.data.reshape(())))


Output = TypeVar("Output", bound="PoolingOutput | EmbeddingOutput | ClassificationOutput | ScoringOutput")


@dataclass
class PoolingRequestOutput(Generic[Output]):
    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    prompt: str | None = None
    lora_request: LoRARequest | None = None
    error: str | None = field(default=None, repr=False)  # why it failed; `outputs` has no values then


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    @staticmethod
    def from_base(request: PoolingRequestOutput[PoolingOutput]) -> "EmbeddingRequestOutput":
        return cast(EmbeddingRequestOutput, _wrap(EmbeddingRequestOutput, request, EmbeddingOutput))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    @staticmethod
    def from_base(request: PoolingRequestOutput[PoolingOutput]) -> "ClassificationRequestOutput":
        return cast(ClassificationRequestOutput, _wrap(ClassificationRequestOutput, request, ClassificationOutput))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    @staticmethod
    def from_base(request: PoolingRequestOutput[PoolingOutput]) -> "ScoringRequestOutput":
        return cast(ScoringRequestOutput, _wrap(ScoringRequestOutput, request, ScoringOutput))


def _wrap(kind: Any, request: PoolingRequestOutput[PoolingOutput], output: Any) -> Any:
    """Return the request's output as another kind. Raise EngineError if the request failed."""
    if request.error is not None:
        raise EngineError(request.error)
    return kind(**{**vars(request), "outputs": output.from_base(request.outputs)})
