"""The state that every endpoint reads: the engine, the settings, the model's names, the system fingerprint."""

import asyncio
import functools
import hashlib
import platform
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

from fastapi import Request

from quire import __version__
from quire.async_llm import AsyncLLM
from quire.config.config import Config
from quire.config.server_args import ServerArgs
from quire.engine.client import check_number
from quire.features.pooling.host import supported_tasks
from quire.features.pooling.io_processor import LoadedProcessor, open_io_processor
from quire.files.identity import identity
from quire.files.resolve import ModelFiles
from quire.obs.metrics import Metrics
from quire.serve.adapters import ServedAdapters
from quire.serve.body import Unparsed
from quire.serve.errors import HttpError, request_id_of
from quire.serve.field_table import UnknownFields, check_fields
from quire.serve.limits import LIMITS, ServerLimits, check_limits
from quire.serve.protocol import GenerationFields, RequestBody, ResponsesRequest
from quire.serve.response_objects import ResponseStore
from quire.serve.tools import ModelFormats, choose_formats
from quire.text.prompts import PromptReader
from quire.text.tokenizer import Tokenizer
from quire.types.errors import InvalidParameter, ModelError
from quire.types.prompts import NO_EXTRAS, Extras, Prompt

_ARGUMENTS = ("model", "revision", "tokenizer", "tokenizer_revision", "hf_overrides", "model_impl", "load_format", "seed",
              "chat_template", "quantization", "dequantized_copies", "enable_expert_parallel", "logprobs_mode",
              "deterministic")  # fmt: skip


@functools.cache
def files_digest(files: ModelFiles) -> Mapping[str, str]:
    """Return the digests of weights, configuration and tokenizer. Large files are sampled: a 70B checkpoint takes milliseconds.

    The server calls it while the engine loads, so that the first request does not read files.
    """
    try:
        return identity(files)
    except ModelError:  # the files were removed; the engine still has what it read
        return {}


def system_fingerprint(config: Config) -> str:
    parts = {
        "files": files_digest(config.facts.files),
        "torch": version("torch"),
        "arguments": [repr(getattr(config.args, name)) for name in _ARGUMENTS],
        "machine": (platform.machine(), config.device, config.device_facts.name, config.device_facts.kernels),
        "types": (config.dtype, config.cache_dtype, config.keep_quantized),
        "ranks": (config.ranks, config.stages),
        "pages": config.page_size,  # on a CPU, attention adds the keys page by page
        "sampling": sorted(config.default_sampling.items()),
    }
    return f"quire-{__version__}-{hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:8]}"


MAX_NAMES = 20  # in an error
_PRINTABLE = re.compile(r"[\x21-\x7e]+")  # ids go into headers and logs


AbortAnswers = Callable[[list[str]], Awaitable[int]]  # ends requests by the ids of their answers; returns how many


@dataclass(frozen=True)
class Server:
    llm: AsyncLLM
    settings: ServerArgs
    limits: ServerLimits = LIMITS
    metrics: Metrics | None = None
    abort_in_others: AbortAnswers | None = None  # in the other API processes
    started: int = field(default_factory=lambda: int(time.time()))
    unparsed: Unparsed = field(default_factory=Unparsed)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)

    @property
    def names(self) -> tuple[str, ...]:
        return self.llm.config.served_names

    @cached_property
    def body_bytes(self) -> int:
        """Return the bytes that a request's body may have."""
        return self.limits.body_bytes if self.llm.media.media is None else self.limits.media_body_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever the same request might be answered differently."""
        return system_fingerprint(self.llm.config)

    @cached_property
    def responses(self) -> ResponseStore:
        return ResponseStore(self.limits.stored_responses, self.limits.stored_bytes)

    @property
    def stores_responses(self) -> bool:
        """Return whether responses are stored: several API processes cannot read each other's."""
        return self.settings.api_server_count == 1

    def check_stored(self, body: ResponsesRequest) -> None:
        for name in () if self.stores_responses else ("background", "previous_response_id"):
            if getattr(body, name):
                raise InvalidParameter(
                    f"{name} is not supported here: a server with several API processes (--api-server-count) stores no "
                    "responses. Send the whole conversation as input",
                    name,
                )

    @cached_property
    def formats(self) -> ModelFormats:
        return choose_formats(self.settings, self.llm.tokenizer, "generate" in supported_tasks(self.llm.config))

    @cached_property
    def io_processor(self) -> LoadedProcessor | None:
        return open_io_processor(self.llm.config, self.llm.max_model_len, self.llm.tokenizer)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """End-of-text ids: the checkpoint's own, and the tokenizer's."""
        tokenizer = self.llm.tokenizer
        ids = {*self.llm.config.facts.eos_ids, None if tokenizer is None else tokenizer.eos_token_id}
        return frozenset(i for i in ids if i is not None)

    def ends_of(self, prompt: Prompt) -> frozenset[int]:
        tokenizer = self.tokenizer_of(prompt)
        own = None if tokenizer is self.llm.tokenizer or tokenizer is None else tokenizer.eos_token_id
        return self.eos_ids if own is None else self.eos_ids | {own}

    def wants_timing(self, request: Request) -> bool:
        """Return whether the answer has timings: by the server's setting or the request's header."""
        return self.settings.enable_per_request_metrics or request.headers.get("x-request-metrics", "").lower() in ("1", "true")

    def count_call(self, outcome: str) -> None:
        if self.metrics is not None:
            self.metrics.tool_calls.add(1, outcome)

    def reported_cached(self, tokens: int) -> int | None:
        return tokens if self.settings.enable_prompt_tokens_details else None

    @property
    def speculates(self) -> bool:
        return self.llm.config.speculation is not None

    @cached_property
    def adapters(self) -> ServedAdapters:
        return ServedAdapters(self.llm, self.settings)

    def extras(self, model: str) -> Extras:
        """Return the extras of a request to this model: the adapter, if it is the name of one."""
        if model in self.names:
            return NO_EXTRAS
        adapter = self.adapters.get(model)
        if adapter is None and not self.settings.accept_any_model_name:
            raise self.no_such_model(model)
        return NO_EXTRAS if adapter is None else adapter.extras

    async def prompts(self, model: str | None) -> tuple[PromptReader, Extras]:
        """Return the prompt reader for requests to this model, and their extras."""
        extras = self.extras(model or self.names[0])
        if extras.lora is None or not extras.lora.added:
            return self.llm.prompts, extras
        return await asyncio.to_thread(self.llm.prompts.of, extras), extras

    def tokenizer_of(self, prompt: Prompt) -> Tokenizer | None:
        """Return the tokenizer of the prompt's adapter if it has one, else the model's."""
        return self.llm.prompts.of(prompt.extras).tokenizer

    def no_such_model(self, name: str) -> HttpError:
        names = [*self.names, *(adapter.name for adapter in self.adapters.all)]
        more = "" if len(names) <= MAX_NAMES else f" and {len(names) - MAX_NAMES} more"
        return HttpError(
            404, f"The model `{name:.200}` does not exist. This server has `{'`, `'.join(names[:MAX_NAMES])}`{more}.", "model"
        )

    async def check(self, body: RequestBody) -> str:
        """Check everything except the prompt; return the model's name for the answer."""
        check_limits(body, self.limits)
        known = body.model is None or body.model in self.names or await self.adapters.find(body.model) is not None
        if not known and not self.settings.accept_any_model_name:
            raise self.no_such_model(str(body.model))
        if unknown := check_fields(body):
            self.unknown_fields.log(body, unknown)
        return body.model or self.names[0]


def server_of(request: Request) -> Server:
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


def answer_id(prefix: str, request: Request, body: GenerationFields) -> str:
    """Return the answer's id: a prefix such as `chatcmpl`, and the id that the client chose or a new one."""
    chosen = request.headers.get("x-request-id") or body.request_id
    if chosen is None:
        return f"{prefix}-{request_id_of(request.scope)}"
    if len(chosen) > LIMITS.identifier_characters or not _PRINTABLE.fullmatch(chosen):
        raise InvalidParameter(
            f"a request id has 1 to {LIMITS.identifier_characters} visible ASCII characters, got {chosen!r:.80}", "request_id"
        )
    return f"{prefix}-{chosen}"


def rank_of(request: Request, llm: AsyncLLM) -> int | None:
    """Return the number of the engine that the header asks for; None: any."""
    header = request.headers.get("x-data-parallel-rank")
    if header is None:
        return None
    if not re.fullmatch("[0-9]{1,6}", header.strip()):
        raise InvalidParameter(
            f"X-data-parallel-rank must be the number of an engine, from 0 on, got {header!r:.80}", "data_parallel_rank"
        )
    check_number(int(header), len(llm.engines))
    return int(header)


def priority_of(request: Request, body: GenerationFields, policy: str) -> int:
    """Return the priority of the body, or of the header if the body has none."""
    priority = body.priority
    header = request.headers.get("x-vllm-priority")
    if header is not None and "priority" not in body.model_fields_set:
        if not re.fullmatch(r"[+-]?\d{1,18}", header.strip()):
            raise InvalidParameter(f"X-Vllm-Priority must be an integer, got {header!r:.80}", "priority")
        priority = int(header)
    if priority != 0 and policy != "priority":
        raise InvalidParameter(
            f"priority={priority} requires a server started with --scheduling-policy priority; "
            "this one runs requests in order of arrival",
            "priority",
        )
    return priority
