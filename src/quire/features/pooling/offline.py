"""The pooling methods of `LLM`: embed, classify, score, reward, encode."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, cast

from quire.features.pooling.requests import (
    ROLES_OF_PAIRS,
    as_pairs,
    engine_template,
    pair_prompt,
    pooling_output,
    pools_tokens,
    prepare_pooling,
    require_pooling,
    similarity,
)
from quire.text.inputs import InputProcessor, PreparedRequest
from quire.text.prompts import Tokenization
from quire.types.adapter import LoRARequest
from quire.types.errors import EngineError, InvalidParameter, NotSupported
from quire.types.outputs import RequestOutput
from quire.types.pooling import (
    IO_PROCESSOR_TASK,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.types.prompts import Extras, Prompt, PromptType

if TYPE_CHECKING:
    from quire.features.pooling.io_processor import LoadedProcessor
    from quire.llm_engine import LLMEngine


class DataPrompt(TypedDict):
    """What an IO processor reads."""

    data: Any


Adapters = LoRARequest | Sequence[LoRARequest | None] | None
Params = PoolingParams | Sequence[PoolingParams] | None
Typed = TypeVar("Typed", covariant=True)
Results = list[PoolingRequestOutput[PoolingOutput]]


class PoolingMethods:
    """`LLM` has these methods; for a model that generates they raise NotSupported."""

    llm_engine: "LLMEngine"
    _ids: "itertools.count[int]"
    _io_processor: "LoadedProcessor | None"

    if TYPE_CHECKING:

        def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]: ...

        def _extras_for(self, lora_request: Adapters, count: int) -> list[Extras]: ...

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: generate, or pooling tasks."""
        return self.llm_engine.get_supported_tasks()

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType] | DataPrompt,
        pooling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        pooling_task: PoolingTask | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Results:
        """Return one output per prompt, in order; its values are float32 arrays.

        Everything is checked before anything runs. A request that fails while running has an `error` and no values; the others
        are not affected. `pooling_task`: of parameters that name none; default: the model's first supported task.
        {"data": ...} goes through the IO processor, whose answer is the only output's `outputs`.
        """
        if isinstance(prompts, dict) and "data" in prompts:
            more = pooling_task, priority, tokenization_kwargs
            data = cast(DataPrompt, prompts)["data"]
            return [self._process(data, pooling_params, use_tqdm, lora_request, *more)]
        batch = as_batch(prompts)
        return self._encode(batch, pooling_params, use_tqdm, lora_request, pooling_task, priority, tokenization_kwargs)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt. Raise EngineError if one failed."""
        done = self._encode(as_batch(prompts), pooling_params, use_tqdm, lora_request, "embed", None, tokenization_kwargs)
        return _as(EmbeddingRequestOutput, done)

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the class probabilities of each prompt. Raise EngineError if one failed."""
        done = self._encode(as_batch(prompts), pooling_params, use_tqdm, lora_request, "classify", None, tokenization_kwargs)
        return _as(ClassificationRequestOutput, done)

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Results:
        """Return the rewards of each prompt: of every token or step, or of the prompt if the model scores whole prompts.

        Scores of whole prompts are raw unless use_activation asks for probabilities.
        """
        whole = require_pooling(self._inputs).head == "classify"
        if whole and pooling_params is None:
            pooling_params = PoolingParams(use_activation=False)
        task: PoolingTask = "classify" if whole else "token_classify"
        return self._encode(as_batch(prompts), pooling_params, use_tqdm, lora_request, task, None, tokenization_kwargs)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the similarity of pairs: one text with one or several, or n texts with n.

        A classifier with one class scores the pair as one prompt; chat_template, a template for messages of the roles query and
        document, writes it. Of an embedder the score is the cosine of the two vectors,
        or, if every token has a vector, the sum over the first text's tokens of their largest similarity with the second's.
        """
        pairs, pooling = as_pairs(data_1, data_2), require_pooling(self._inputs)
        if "score" not in pooling.tasks:
            raise NotSupported(
                f"score requires an embedding model or one class, and this model supports {', '.join(pooling.tasks)} with "
                f"{pooling.size} classes. Use classify",
                "model",
            )
        options = use_tqdm, lora_request
        if pooling.head == "embed":
            if chat_template is not None:
                raise NotSupported(
                    "chat_template requires a model that reads both texts as one prompt; this one embeds each text. Remove it",
                    "chat_template",
                )
            task: PoolingTask = "embed" if "embed" in pooling.tasks else "token_embed"
            return self._score_vectors(pairs, task, pooling_params, *options, tokenization_kwargs)
        reader = self._inputs.prompts
        keep = _kept(pooling_params, tokenization_kwargs, reader.max_model_len)
        template = chat_template or engine_template(self.llm_engine.config)
        prompts = [pair_prompt(reader, pooling, query, document, keep, template=template) for query, document in pairs]
        done = self._encode(prompts, pooling_params, *options, "score", None, None)
        return _as(ScoringRequestOutput, done)

    def _score_vectors(
        self,
        pairs: Sequence[tuple[str, str]],
        task: PoolingTask,
        params: PoolingParams | None,
        use_tqdm: bool,
        lora: Adapters,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[ScoringRequestOutput]:
        roles = ROLES_OF_PAIRS if require_pooling(self._inputs).late is not None else (None, None)
        wanted = list(dict.fromkeys((role, text) for pair in pairs for role, text in zip(roles, pair, strict=True)))
        each = [_with_prompt(params, role) for role, _ in wanted]
        found = self._encode([text for _, text in wanted], each, use_tqdm, lora, task, None, tokenization_kwargs)
        done = dict(zip(wanted, found, strict=True))
        for (_, text), one in done.items():
            if one.error is not None:
                raise EngineError(f"{text!r:.80}: {one.error}")
        scored = []
        for query, document in pairs:
            first, second = done[roles[0], query], done[roles[1], document]
            score = similarity(first.outputs.data, second.outputs.data)
            ids = [*first.prompt_token_ids, *second.prompt_token_ids]
            cached = first.num_cached_tokens + second.num_cached_tokens
            scored.append(ScoringRequestOutput(f"{first.request_id}_{second.request_id}", ScoringOutput(score), ids, cached))
        return scored

    def _process(
        self,
        data: Any,
        params: Params,
        use_tqdm: bool,
        lora_request: Adapters,
        task: PoolingTask | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> PoolingRequestOutput[Any]:
        require_pooling(self._inputs)
        processor = self._io_processor
        if processor is None:
            raise InvalidParameter("data requires an IO processor. Set io_processor_plugin", "data")
        if tokenization_kwargs:
            raise NotSupported("tokenization_kwargs is not supported with data. Remove it", "tokenization_kwargs")
        if not isinstance(params, PoolingParams | None):
            raise InvalidParameter("pooling_params must be one PoolingParams for data", "pooling_params")
        request_id = str(next(self._ids))
        parsed, merged = processor.begin(data, params)
        prompts = processor.pre_process(parsed, self._inputs.prompts, request_id)
        asked = None if task == IO_PROCESSOR_TASK else task
        outputs = self._encode(prompts, merged, use_tqdm, lora_request, asked, priority, None)
        for i, one in enumerate(outputs):
            if one.error is not None:
                raise EngineError(f"prompt {i} of the IO processor {processor.name!r}: {one.error}")
        cached = sum(one.num_cached_tokens for one in outputs)
        answer: Any = processor.post_process(outputs, parsed, request_id)
        return PoolingRequestOutput(request_id, answer, [], cached)

    @property
    def _inputs(self) -> InputProcessor:
        return self.llm_engine.inputs

    def _encode(
        self,
        batch: Sequence[PromptType | Prompt],
        params: Params,
        use_tqdm: bool,
        lora_request: Adapters,
        task: PoolingTask | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> Results:
        require_pooling(self._inputs)
        how = Tokenization.of(tokenization_kwargs) if tokenization_kwargs else None
        each = [params or PoolingParams()] * len(batch) if params is None or isinstance(params, PoolingParams) else list(params)
        priorities = [0] * len(batch) if priority is None else list(priority)
        for name, values in (("pooling_params", each), ("priority", priorities)):
            if len(values) != len(batch):
                raise InvalidParameter(f"{name} has {len(values)} entries for {len(batch)} prompts", name)
        prepared = [
            prepare_pooling(
                self._inputs, str(next(self._ids)), prompt, one, arrival=time.time(), task=task, how=how,
                priority=rank, extras=extras,
            )
            for prompt, one, rank, extras in zip(
                batch, each, priorities, self._extras_for(lora_request, len(batch)), strict=True
            )
        ]  # fmt: skip
        outputs = self._run(prepared, use_tqdm)
        return [pooling_output(output, pools_tokens(one)) for output, one in zip(outputs, prepared, strict=True)]


def _with_prompt(params: PoolingParams | None, name: str | None) -> PoolingParams:
    """Return the parameters with this prompt, if they name none."""
    if name is None or (params is not None and params.prompt_name is not None):
        return params or PoolingParams()
    return replace(params or PoolingParams(), prompt_name=name)


def _kept(params: PoolingParams | None, tokenization_kwargs: Mapping[str, Any] | None, longest: int) -> int | None:
    """Return how many tokens of a pair are kept; None: all."""
    how = Tokenization.of(tokenization_kwargs)
    truncates = how.truncation in (True, "longest_first")
    rest = Tokenization(truncation=how.truncation if truncates else None, max_length=how.max_length)
    if how != rest:
        raise NotSupported(
            "of tokenization_kwargs, only truncation and max_length are supported by score of pairs", "tokenization_kwargs"
        )
    keep = None if params is None else params.truncate_prompt_tokens
    if keep is None and truncates:
        keep = how.max_length or longest
    return longest if keep == -1 else keep


class FromBase(Protocol[Typed]):
    """A kind of pooling output."""

    @staticmethod
    def from_base(request: PoolingRequestOutput[PoolingOutput]) -> Typed: ...


def _as(kind: FromBase[Typed], done: Results) -> list[Typed]:
    """Return outputs as another kind. Raise EngineError if a request failed; encode returns the other ones."""
    for i, one in enumerate(done):
        if one.error is not None:
            raise EngineError(f"prompts[{i}]: {one.error}. encode returns the values of all other prompts")
    return [kind.from_base(one) for one in done]


def as_batch(prompts: Any) -> list[PromptType]:
    """Return a list of prompts. A list of integers is one prompt."""
    if isinstance(prompts, str | dict):
        return [cast(PromptType, prompts)]
    if not isinstance(prompts, list | tuple):
        raise InvalidParameter(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}", "prompts")
    if not prompts:
        raise InvalidParameter("prompts is empty. Give at least one prompt", "prompts")
    if isinstance(prompts[0], int):
        return [cast(PromptType, list(prompts))]
    return list(prompts)
