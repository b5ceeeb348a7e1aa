"""Turn a prompt into engine requests, with every check that needs the model's sizes.

The result is tokens, resolved parameters and a seed; scheduling is not known here.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.config.config import Config
from quire.config.features import cache_salt
from quire.features.pooling.host import ModelPooling, pooling_of
from quire.text.prompts import PromptReader, Tokenization
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import AdapterTokenizers
from quire.types.adapter import LoRARequest
from quire.types.checks import LARGEST_INT, check_int, shown
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.prompts import NO_EXTRAS, Extras, Prompt, PromptType
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.structured import FIELD, MAX_GRAMMAR_BYTES, StructuredOutputsParams

if TYPE_CHECKING:
    from quire.features.media.prompt import Placeholders
    from quire.text.offload import TextOffload

_MASK64 = 2**64 - 1
SHORT = 4096  # token ids that are checked faster than they are handed to a thread
_TOKEN_IDS = (
    "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "thinking_end_ids", "thinking_forced_ids", "logit_bias"
)  # fmt: skip


@dataclass(frozen=True)
class PreparedRequest:
    """One user request, checked. `requests` has one entry per completion (n); all but the first fork the first."""

    id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    requests: tuple[EngineRequest, ...]
    tokenizer: Tokenizer | None = None  # of its adapter, if that has its own

    @property
    def lora_name(self) -> str:
        return self.requests[0].extras.lora_name

    @cached_property
    def lora_request(self) -> LoRARequest | None:
        extras = self.requests[0].extras
        return None if extras.lora is None else LoRARequest(extras.lora_name, extras.lora.key, extras.lora.path)


class InputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        eos_ids: Iterable[int],
        seed: int,
        structured_outputs: Mapping[str, Any] | None = None,
        stream_interval: int = 1,
        offload: "TextOffload | None" = None,
        tokenizers: AdapterTokenizers | None = None,
        pooling: ModelPooling | None = None,
        placeholders: "Placeholders | None" = None,
    ) -> None:
        """`pooling`: the model pools and generates nothing.
        `placeholders`: of images and videos, which are refused in prompts without these.
        `structured_outputs` are defaults of structured_outputs_config for answers in JSON. `tokenizers`: of adapters."""
        self.prompts = PromptReader(tokenizer, vocab_size, max_model_len, offload, tokenizers)
        self.tokenizer, self.pooling, self._placeholders = tokenizer, pooling, placeholders
        self.vocab_size = vocab_size
        self.max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < vocab_size)
        self.seed = seed
        self._no_blanks = (structured_outputs or {}).get("disable_any_whitespace", False)
        self._closed = (structured_outputs or {}).get("disable_additional_properties", True)
        self._stream_interval = stream_interval
        self._unseeded = itertools.count()

    @classmethod
    def of(
        cls,
        config: Config,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        offload: "TextOffload | None" = None,
        placeholders: "Placeholders | None" = None,
    ) -> "InputProcessor":
        """Return the processor of an engine whose cache serves `max_model_len` tokens.

        The ids that end a text are those of the checkpoint and of the tokenizer.
        """
        ends = list(config.facts.eos_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ends.append(tokenizer.eos_token_id)
        return cls(
            tokenizer,
            vocab_size=config.facts.vocab_size,
            max_model_len=max_model_len,
            max_logprobs=config.max_logprobs,
            eos_ids=ends,
            seed=config.seed,
            structured_outputs=config.args.structured_outputs_config,
            stream_interval=config.args.stream_interval,
            offload=offload,
            tokenizers=AdapterTokenizers(tokenizer, config.args.chat_template is not None) if config.adapter_tokens else None,
            pooling=pooling_of(config),
            placeholders=placeholders,
        )

    def prepare(
        self,
        request_id: str,
        prompt: PromptType | Prompt,
        params: SamplingParams,
        *,
        arrival: float,
        how: Tokenization | None = None,
        priority: int = 0,
        tenant: str | None = None,
        engine_id: str | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> PreparedRequest:
        """Check a request, tokenize its prompt and resolve defaults. Raise RequestError for what the model does not support.

        tenant: cached pages are shared only among its requests, and slots fairly among tenants
        engine_id: id inside the engine, if it differs from request_id
        """
        check_int("priority", priority, -LARGEST_INT - 1)
        if not isinstance(params, SamplingParams):
            raise InvalidParameter(f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params")
        if self.pooling is not None:
            raise NotSupported(
                f"this model generates no text; it supports {', '.join(self.pooling.tasks)}. Use embed, classify, score or "
                "encode",
                "model",
            )
        if isinstance(prompt, Prompt) and extras == NO_EXTRAS:
            extras = prompt.extras
        prompts = self.prompts if extras.lora is None else self.prompts.of(extras)
        read = prompts.read(prompt, how, extras)
        ids = prompts.check(read)
        if self._placeholders is not None and not read.extras.media:
            self._placeholders.refuse_in(ids)
        salt = cache_salt(read.extras)
        if read.cache_salt is not None:
            salt = (*salt, f"tenant={read.cache_salt}")
        params = params.clone()
        self._check_params(params, prompts.vocab_size)
        if params.max_tokens is None:
            params.max_tokens = prompts.room(len(ids))
        if params.stream_interval is None:
            params.stream_interval = self._stream_interval
        # with a grammar, the text ends where the grammar allows nothing else, also with ignore_eos
        eos_ids = frozenset() if params.ignore_eos and params.structured_outputs is None else self.ends(prompts)
        bad_words = _bad_word_ids(prompts.tokenizer, params.bad_words) if params.bad_words else ()
        if params.structured_outputs is not None:
            bad_words = tuple(word for word in bad_words if word[-1] not in eos_ids)
            if params.allowed_token_ids is not None:
                params.allowed_token_ids = sorted({*params.allowed_token_ids, *eos_ids})
        base = EngineRequest(
            id=engine_id or request_id,
            prompt=ids,
            params=params,
            seed=self._seed_for(params),
            stop_ids=eos_ids | frozenset(params.stop_token_ids or ()),
            eos_ids=eos_ids,
            arrival=arrival,
            bad_words=bad_words,
            priority=priority,
            tenant=tenant or "",
            salt=salt if tenant is None else (*salt, f"owner={tenant}"),
            extras=read.extras,
        )
        tokenizer = None if prompts.tokenizer is self.tokenizer else prompts.tokenizer
        requests = (base,) if params.n == 1 else fan_out(base, params.n)
        return PreparedRequest(request_id, read.text, ids, params, requests, tokenizer)

    def ends(self, prompts: PromptReader) -> frozenset[int]:
        """Tokens that end a text: the model's, and that of the tokenizer."""
        tokenizer = prompts.tokenizer
        own = None if tokenizer is None or tokenizer is self.tokenizer else tokenizer.eos_token_id
        return self.eos_ids if own is None or own >= prompts.vocab_size else self.eos_ids | {own}

    def _check_params(self, params: SamplingParams, vocab_size: int) -> None:
        if params.structured_outputs is not None:
            self._check_structured(params.structured_outputs)
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name)) is not None:
                self._check_logprobs(name, asked)
        for name in _TOKEN_IDS:
            if ids := getattr(params, name):
                _check_ids(name, ids, vocab_size)
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidParameter(f"{name} needs a tokenizer, and this engine was started with skip_tokenizer_init", name)

    def _check_logprobs(self, name: str, asked: int) -> None:
        if (self.vocab_size if asked == -1 else asked) > self.max_logprobs:
            raise InvalidParameter(
                f"{name}={asked} asks for more than this engine allows ({self.max_logprobs}); raise max_logprobs", name
            )

    def _check_structured(self, params: StructuredOutputsParams) -> None:
        if find_spec("llguidance") is None:
            raise NotSupported(f"{FIELD} cannot be used: llguidance is not installed (pip install 'quire[structured]')", FIELD)
        if self.tokenizer is None:
            raise InvalidParameter(f"{FIELD} needs a tokenizer, and this engine was started with skip_tokenizer_init", FIELD)
        for token in params.starts_after or ():
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter(f"{FIELD}.starts_after: token id {token} is out of vocabulary", FIELD)
        if params.constraint in ("json", "json_object"):
            params.disable_any_whitespace |= self._no_blanks and params.whitespace_pattern is None
            if params.disable_additional_properties is None:
                params.disable_additional_properties = self._closed
        size = params.size
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidParameter(
                f"{FIELD}.{params.constraint} has {size} bytes; at most {MAX_GRAMMAR_BYTES} can be compiled", FIELD
            )

    def _seed_for(self, params: SamplingParams) -> int:
        """Unseeded requests differ from each other, but a whole run repeats when its requests come in the same order."""
        if params.seed is not None:
            return params.seed & _MASK64
        return (self.seed * 0x9E3779B97F4A7C15 + (next(self._unseeded) + 1) * 0xD1B54A32D192ED03) & _MASK64


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidParameter(f"{name}: token id {shown(token)} is out of vocabulary (0 to {vocab_size - 1})", name)


def _bad_word_ids(tokenizer: Tokenizer | None, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of banned words, at the start of a text and after a space: their first tokens often differ."""
    out: list[tuple[int, ...]] = []
    for word in words:
        assert tokenizer is not None
        plain = tuple(tokenizer.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        out.append(plain)
        if spaced != plain and spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            out.append(spaced)
    return tuple(ids for ids in out if ids)


def fan_out(base: EngineRequest, n: int) -> tuple[EngineRequest, ...]:
    """Return n requests for n completions of one prompt; the later ones share the pages of the first."""
    first = f"{base.id}#0"
    return tuple(
        replace(base, id=f"{base.id}#{i}", seed=(base.seed + i) & _MASK64, fork_of=first if i else None) for i in range(n)
    )


def is_quick(prompt: PromptType | Prompt, params: SamplingParams) -> bool:
    """Return whether nothing must be tokenized, and little must be checked."""
    ids = prompt.ids if isinstance(prompt, Prompt) else prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    return isinstance(ids, list) and len(ids) <= SHORT and not getattr(params, "bad_words", None)
