"""A prompt and pooling parameters become a request of the engine, and its output becomes a pooling output."""

from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.config.features import cache_salt
from quire.features.pooling.host import ModelPooling, Role
from quire.features.pooling.late_interaction import find_role, role_reader, with_role
from quire.text.inputs import InputProcessor, PreparedRequest
from quire.text.prompts import PromptReader, Tokenization
from quire.text.tokenizer import Tokenizer
from quire.types.checks import LARGEST_INT, check_int
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.outputs import RequestOutput
from quire.types.plan import Floats
from quire.types.pooling import Pooling, PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.prompts import NO_EXTRAS, Extras, Prompt, PromptType
from quire.types.request import EngineRequest
from quire.types.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.config.config import Config

# Qwen3-Reranker was trained on this form; its three parts are tokenized separately
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def require_pooling(inputs: InputProcessor) -> ModelPooling:
    """Return how the model pools. Raise NotSupported if it generates."""
    if inputs.pooling is None:
        raise NotSupported(
            "this model generates text and pools nothing. Start the engine with runner='pooling' for embeddings, or use a "
            "model with a classification head",
            "model",
        )
    return inputs.pooling


def prepare_pooling(
    inputs: InputProcessor,
    request_id: str,
    prompt: PromptType | Prompt,
    params: PoolingParams,
    *,
    arrival: float,
    task: str | None = None,
    how: Tokenization | None = None,
    priority: int = 0,
    tenant: str | None = None,
    engine_id: str | None = None,
    extras: Extras = NO_EXTRAS,
) -> PreparedRequest:
    """Raise RequestError for anything this model cannot do. task: of requests whose parameters name none."""
    pooling = require_pooling(inputs)
    if not isinstance(params, PoolingParams):
        raise InvalidParameter(f"pooling_params must be PoolingParams, got {type(params).__name__}", "pooling_params")
    check_int("priority", priority, -LARGEST_INT - 1)
    if isinstance(prompt, Prompt):
        extras = prompt.extras if extras == NO_EXTRAS else with_role(extras, prompt)
    asked = pooling.request(params, task)
    prompts = inputs.prompts if extras.lora is None else inputs.prompts.of(extras)
    tokenization, reader = _tokenization(params, how, prompts.max_model_len), None
    if not isinstance(prompt, Prompt):
        if (role := find_role(pooling, params.prompt_name)) is not None and prompts.tokenizer is not None:
            reader = role_reader(prompts.tokenizer, pooling, role, prompts.max_model_len)
            tokenization = _bounded(tokenization, reader.room)
        prompt, before = _as_files_say(prompt, pooling, params.prompt_name, None if reader is None else reader.text)
        extras = replace(extras, unpooled=unpooled_tokens(prompts.tokenizer, pooling, before))
    read = prompts.read(prompt, tokenization, extras)
    if reader is not None:
        read = reader.complete(read)
    ids = prompts.check(read, answered=False)
    if asked.step_tag_id is not None and asked.step_tag_id >= prompts.vocab_size:
        raise InvalidParameter(
            f"step_tag_id must be below {prompts.vocab_size}, the size of the vocabulary; got {asked.step_tag_id}",
            "step_tag_id",
        )
    salt = cache_salt(read.extras)
    salt = salt if read.cache_salt is None else (*salt, f"tenant={read.cache_salt}")
    sampling = _nothing_drawn(asked.reads_all or bool(params.skip_reading_prefix_cache))
    request = EngineRequest(
        id=engine_id or request_id,
        prompt=ids,
        params=sampling,
        seed=0,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        arrival=arrival,
        priority=priority,
        tenant=tenant or "",
        salt=salt if tenant is None else (*salt, f"owner={tenant}"),
        extras=_extras_of(asked) if read.extras == NO_EXTRAS else replace(read.extras, pooling=asked),
    )
    return PreparedRequest(request_id, read.text, ids, sampling, (request,))


@lru_cache(256)
def _extras_of(pooling: Pooling) -> Extras:
    return Extras(pooling=pooling)


@cache
def _nothing_drawn(skip_prefix_cache: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=skip_prefix_cache,
    )


def _bounded(how: Tokenization | None, most: int) -> Tokenization:
    """Return the tokenization with at most this many tokens, cut at the end."""
    asked = None if how is None else how.truncate_prompt_tokens or how.max_length
    kept = most if asked in (None, -1) else min(most, asked)
    return replace(
        how or Tokenization(), truncation=None, max_length=None, truncate_prompt_tokens=kept, truncation_side="right"
    )


def _as_files_say(prompt: PromptType, pooling: ModelPooling, name: str | None, instead: str | None) -> tuple[PromptType, str]:
    """Return the prompt as the files of sentence-transformers change it, and what they put before its text.

    name: of the text before it; None: the files' default; "": nothing
    instead: what goes before it in place of the text of that name
    """
    parts: dict[str, Any] = prompt if isinstance(prompt, dict) else {"prompt": prompt}  # type: ignore[assignment]
    text = None if "prompt_token_ids" in parts else parts.get("prompt")
    before = pooling.before(name, isinstance(text, str))
    if not isinstance(text, str) or not text:
        return prompt, ""
    before = before if instead is None else instead
    changed = before + text
    if pooling.files is not None and pooling.files.lower_case:
        changed = changed.lower()
    return cast(PromptType, {**parts, "prompt": changed} if isinstance(prompt, dict) else changed), before


def unpooled_tokens(tokenizer: Tokenizer | None, pooling: ModelPooling, before: str) -> int:
    """Return how many tokens at the beginning of a text are left out of the mean: those of the prompt `before` it, and the
    special tokens before that."""
    files = pooling.files
    if tokenizer is None or files is None or files.include_prompt or not before:
        return 0
    ids = tokenizer.encode(before.lower() if files.lower_case else before)
    return len(ids) - (bool(ids) and ids[-1] in tokenizer.special_ids)


def _tokenization(params: PoolingParams, how: Tokenization | None, longest: int) -> Tokenization | None:
    """Return how the prompt is tokenized. A truncated prompt keeps its beginning, as encoders do."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return how
    if keep > longest:
        raise InvalidParameter(
            f"truncate_prompt_tokens must be at most the model's context of {longest} tokens; got {keep}",
            "truncate_prompt_tokens",
        )
    return replace(how or Tokenization(), truncate_prompt_tokens=longest if keep == -1 else keep, truncation_side="right")


def pooling_output(output: RequestOutput, per_token: bool) -> PoolingRequestOutput[PoolingOutput]:
    """Return a finished request as a pooling output; `error` says why it failed."""
    choice, data = output.outputs[0], output.pooled
    error = choice.error or (f"the request ended with {choice.finish_reason}" if data is None else None)
    values = np.zeros((0, 0) if per_token else 0, np.float32) if data is None else data if per_token else data[0]
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=PoolingOutput(values),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        prompt=output.prompt,
        lora_request=output.lora_request,
        error=error,
    )


def pools_tokens(prepared: PreparedRequest) -> bool:
    """Return whether the result has a row for each token."""
    pooling = prepared.requests[0].extras.pooling
    return pooling is not None and pooling.per_token


# ---- pairs of texts


ROLES_OF_PAIRS: tuple[Role, Role] = ("query", "document")


def similarity(first: Floats, second: Floats) -> float:
    """Return the cosine of two vectors, or of [tokens, size] arrays the sum of each first token's largest similarity."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    if first.ndim == 1:
        return float(first @ second) / max(float(np.linalg.norm(first) * np.linalg.norm(second)), 1e-12)
    return float((first @ second.T).max(axis=1).sum()) if len(second) else 0.0


def pair_prompt(
    prompts: PromptReader,
    pooling: ModelPooling,
    query: str,
    document: str,
    keep: int | None = None,
    extras: Extras = NO_EXTRAS,
    template: str | None = None,
) -> Prompt:
    """Return the prompt of a cross-encoder. keep: most tokens; the longer text loses tokens first, at its end.

    template: a chat template for messages of the roles query and document. Qwen3-Reranker has a template of its own; else the
    two texts stand as the tokenizer's template for pairs says.
    """
    tokenizer = prompts.tokenizer
    if tokenizer is None:
        raise InvalidParameter("scores of texts require a tokenizer. Remove skip_tokenizer_init", "data_1")
    if pooling.files is not None and pooling.files.lower_case:
        query, document = query.lower(), document.lower()
    if template is not None:
        if keep is not None:
            raise NotSupported(
                "truncate_prompt_tokens is not supported with chat_template. Shorten the texts", "truncate_prompt_tokens"
            )
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        return Prompt(text, tokenizer.encode(text), extras=extras)
    if pooling.template == "qwen3_reranker":
        pair = _PAIR.format(instruction=INSTRUCTION, query=query, document=document)
        head, body, tail = (tokenizer.encode(text, add_special_tokens=False) for text in (_BEFORE, pair, _AFTER))
        ids = [*head, *(body if keep is None else body[: max(0, keep - len(head) - len(tail))]), *tail]
        return Prompt(None if keep is not None else f"{_BEFORE}{pair}{_AFTER}", ids, extras=extras)
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (query, document))
    if keep is not None:
        counts = tokenizer.template.fit(len(first), len(second), keep)
        first, second = first[: counts[0]], second[: counts[1]]
    ids, segment = tokenizer.template.join(first, second)
    return Prompt(None, ids, extras=replace(extras, segment=segment))


def engine_template(config: "Config") -> str | None:
    """Return the name of the template that the argument chat_template gave the tokenizer; None: there is none."""
    return None if config.args.chat_template is None else "default"


def as_pairs(data_1: object, data_2: object) -> list[tuple[str, str]]:
    """Return the pairs of texts that are scored: 1 to 1, 1 to n or n to n."""
    first, second = (_as_texts(data, name) for data, name in ((data_1, "data_1"), (data_2, "data_2")))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidParameter(
            f"data_1 must have one text, or as many as data_2 ({len(second)}); got {len(first)}. Score each text on its own",
            "data_1",
        )
    return list(zip(first, second, strict=True))


def _as_texts(data: object, name: str) -> list[str]:
    texts = [data] if isinstance(data, str) else list(data) if isinstance(data, list | tuple) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise InvalidParameter(f"{name} must be a text or a list of texts; got {type(data).__name__}", name)
    if not texts:
        raise InvalidParameter(f"{name} is empty. Give at least one text", name)
    return cast(list[str], texts)
