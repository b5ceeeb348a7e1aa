"""LLMEngine: the text half and an engine core in this process, stepped by the caller.

prompt ─► InputProcessor ─► EngineCore.add ... EngineCore.step ─► TokenDelta ─► OutputProcessor ─► RequestOutput

With data_parallel_size there are several cores, in processes of their own, and what is stepped here is `Replicas`. Where ranks
are started by an external launcher, it is one of them (`engine/external.py`).
"""

import asyncio
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, cast

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.model_config import ModelConfig, VllmConfig
from quire.config.resolve import resolve
from quire.device.registry import describe_unseen
from quire.engine.assemble import resolve_here, start_core
from quire.engine.core import EngineCore
from quire.engine.external import Follower, Leader, start_rank
from quire.engine.handle import check_rank_call
from quire.engine.replicas import Replicas
from quire.engine.timeline import Stopwatch
from quire.features.lora.client import AdapterNames, NamedAdapter
from quire.features.media.inputs import NO_OPTIONS, MediaOptions
from quire.features.media.reader import MediaReader
from quire.features.media.requests import MediaLoop, has_media, read_prompt, references, without_media
from quire.features.pooling.host import supported_tasks
from quire.features.pooling.requests import pooling_output, pools_tokens, prepare_pooling
from quire.features.profiling.control import EngineProfiles
from quire.features.structured.grammar.schema import unenforced
from quire.not_built import LLMEngineNotBuilt, refuse_connector
from quire.progress import doing
from quire.stat_loggers import StatLoggers, make_stat_loggers
from quire.text.inputs import InputProcessor, PreparedRequest
from quire.text.outputs import OutputProcessor
from quire.text.prompts import Tokenization
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import open_tokenizer
from quire.types.adapter import LoRARequest
from quire.types.errors import EngineDead, NotSupported, RequestError
from quire.types.outputs import RequestOutput
from quire.types.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.prompts import NO_EXTRAS, Extras, Prompt, PromptType
from quire.types.sampling import SamplingParams
from quire.types.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)


class LLMEngine(EngineProfiles, LLMEngineNotBuilt):
    def __init__(self, config: Config, watch: Stopwatch | None = None) -> None:
        self._stop_media: Callable[[], object] = lambda: None
        try:
            self._start(config, watch or Stopwatch())
        except BaseException:
            self._stop_media()
            if config.in_use is not None:
                config.in_use.end()  # the traceback may keep the configuration
            raise

    def _start(self, config: Config, watch: Stopwatch) -> None:
        with doing("reading the tokenizer"):
            self.tokenizer = open_tokenizer(config)
        watch.lap("tokenizer")
        self.media = MediaReader(config, self.tokenizer)
        self._media_loop = MediaLoop(self.media)
        self._stop_media = weakref.finalize(self, self._media_loop.close)
        self.media.start()  # its processes import while the model is loaded
        self.core: EngineCore | Replicas | Leader | Follower
        if config.args.data_parallel_size > 1:
            replicas = self.core = Replicas(config, watch)
            self.config, self.max_model_len, self.timeline = replicas.config, replicas.max_model_len, replicas.timeline
        else:
            external = config.args.distributed_executor_backend == "external_launcher"
            started = start_rank(config, watch) if external else start_core(config, watch)
            self.core, self.config, self.timeline = started.core, config, started.timeline
            self.max_model_len = started.max_model_len
        self._stop = weakref.finalize(self, self.core.stop)
        self._stop.atexit = False  # a process that ends gives its memory back, and its children end with it
        config = self.config
        self.inputs = InputProcessor.of(config, self.tokenizer, self.max_model_len, placeholders=self.media.placeholders)
        vocabulary = config.facts.vocab_size if config.adapter_tokens else None
        opener, bounds = self.inputs.prompts.open_tokenizer, config.adapter_bounds
        self.adapters = AdapterNames(config.max_loras > 0, vocabulary, opener, bounds)
        self.outputs = OutputProcessor(self.tokenizer, page_size=config.page_size if config.prefix_caching else 0)
        self._stat_loggers: StatLoggers | None = None
        self._serials = count()
        self._pools_tokens: dict[str, bool] = {}  # requests of `add_request` with PoolingParams: each token has values
        logger.info("ready after %s", self.timeline)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,  # noqa: ARG003
        stat_loggers: Sequence[Any] | None = None,
    ) -> "LLMEngine":
        """Start an engine. `usage_context`: caller metadata of vLLM's usage statistics, which Quire does not collect."""
        watch = Stopwatch.of_engine("until the call")
        several = engine_args.data_parallel_size > 1  # the device is decided where it is used
        config = resolve(engine_args, lambda: "cpu", describe_unseen) if several else resolve_here(engine_args, watch)
        loggers = make_stat_loggers(config, stat_loggers)
        made = cls(config, watch)
        made._add_stat_loggers(loggers)
        return made

    def _add_stat_loggers(self, loggers: StatLoggers | None) -> None:
        self._stat_loggers, core = loggers, self.core
        if loggers is not None:
            engines = core.engines if isinstance(core, Replicas) else ()
            loggers.read_stats = lambda number: engines[number].stats if engines else core.stats
            self.outputs.observe(loggers)
            for number in range(max(1, len(engines))):
                loggers.on_ready(number)

    def do_log_stats(self) -> None:
        """Call `log` of the stat loggers."""
        if self._stat_loggers is not None:
            self._stat_loggers.log()

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check and queue one request; a RequestError leaves the engine as it was. `step` returns the output of a request with
        PoolingParams as a PoolingRequestOutput.

        The engine's id gets a serial suffix, so the user may reuse request_id before the core reports the old end.
        """
        extras, inside = self.extras_of(lora_request), f"{request_id}-{next(self._serials)}"
        how = Tokenization.of(tokenization_kwargs) if tokenization_kwargs else None
        if isinstance(params, PoolingParams):
            self._check_open()
            arrival = time.time() if arrival_time is None else arrival_time
            pooled = prepare_pooling(
                self.inputs, request_id, prompt, params, arrival=arrival, how=how, priority=priority, engine_id=inside,
                extras=extras,
            )  # fmt: skip
            self.submit(pooled)
            self._pools_tokens[request_id] = pools_tokens(pooled)
            return
        self.submit(self.prepare(request_id, prompt, params, arrival_time, priority, how, extras, inside))

    def prepare(
        self,
        request_id: str,
        prompt: PromptType | Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        how: Tokenization | None = None,
        extras: Extras = NO_EXTRAS,
        engine_id: str | None = None,
    ) -> PreparedRequest:
        self._check_open()
        arrival = time.time() if arrival_time is None else arrival_time
        [prompt] = self.read_media([prompt], how, extras=[extras])
        prepared = self.inputs.prepare(
            request_id, prompt, params, arrival=arrival, priority=priority, how=how, engine_id=engine_id, extras=extras
        )
        if prepared.params.structured_outputs is not None:
            self._check_grammar(prepared.params.structured_outputs)
        return prepared

    def read_media(
        self,
        prompts: Sequence[PromptType | Prompt],
        how: Tokenization | None = None,
        options: MediaOptions = NO_OPTIONS,
        extras: Sequence[Extras] | None = None,
    ) -> list[PromptType | Prompt]:
        """Read the images and videos of all prompts at the same time; return the prompts with them. extras: of each prompt."""
        read: list[PromptType | Prompt] = [without_media(prompt) for prompt in prompts]
        with_media = [i for i, prompt in enumerate(prompts) if has_media(prompt)]
        if not with_media:
            return read

        async def read_one(i: int) -> Prompt:
            prompt = cast(Mapping[str, Any], prompts[i])
            reader = self.inputs.prompts.of(NO_EXTRAS if extras is None else extras[i])

            async def encode(text: str, add_special_tokens: bool) -> list[int]:
                if reader.tokenizer is None:
                    raise RequestError("there is no tokenizer (skip_tokenizer_init)", "prompt")
                return reader.tokenizer.encode(text, add_special_tokens)

            return await read_prompt(self.media, reader, prompt, refs[i], encode, options, how)

        async def read_all() -> list[Prompt]:
            return await asyncio.gather(*map(read_one, with_media))

        refs = {i: references(cast(Mapping[str, Any], prompts[i])) for i in with_media}
        for i, prompt in zip(with_media, self._media_loop.run(read_all()), strict=True):
            read[i] = prompt
        return read

    def _check_grammar(self, params: StructuredOutputsParams) -> None:
        self.core.constraints.check(params)
        if keywords := unenforced(params):
            listed = ", ".join(keywords)
            warnings.warn(f"the grammar does not enforce these keywords of the JSON schema: {listed}", stacklevel=3)

    def submit(self, prepared: PreparedRequest) -> None:
        self._check_open()
        if prepared.id in self.outputs:
            raise RequestError(f"request id {prepared.id!r} is in use", "request_id")
        added: list[str] = []
        try:
            for request in prepared.requests:
                self.core.add(request)
                added.append(request.id)
        except RequestError:
            self.core.abort(added)
            raise
        self.outputs.add(prepared)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Run one step; return the new outputs, those of requests with PoolingParams as pooling outputs."""
        outputs = self.step_requests()
        if not self._pools_tokens:
            return [*outputs]
        return [
            pooling_output(output, self._pools_tokens.pop(output.request_id))
            if output.request_id in self._pools_tokens
            else output
            for output in outputs
        ]

    def step_requests(self) -> list[RequestOutput]:
        """Run one step; return the new outputs. Requests that a stop string ended are aborted in the engine core, too."""
        self._check_open()
        try:
            deltas = self.core.step()
        except EngineDead:
            self._check_open()
            raise
        self._check_open()  # another thread may have shut the engine down during the step
        processed = self.outputs.process(deltas, self.core.number)
        if processed.aborts:
            self.core.abort(processed.aborts)
        return processed.outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests at once; they give no further output. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            self._pools_tokens.pop(request_id, None)
        self.core.abort([inner for request_id in ids for inner in self.outputs.forget(request_id)])

    # ---- adapters --------------------------------------------------------------------------------------------------------

    def extras_of(self, lora_request: LoRARequest | None) -> Extras:
        """Return the extras of a request with this adapter. A new adapter is loaded; raise why it cannot be."""
        if lora_request is None:
            return NO_EXTRAS
        self._check_open()
        known = self.adapters.known(self.adapters.check(lora_request))
        return (known or self._load(lora_request)).extras

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request needs it, or again (`load_inplace`); running requests keep their version."""
        return self.extras_of(lora_request).lora is not None

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; return False if it does not exist. Requests that run with it continue."""
        self._check_open()
        adapter = self.adapters.of_key(lora_id)
        if adapter is not None:
            self._retire(self.adapters.remove(adapter.name))
        return adapter is not None

    def list_loras(self) -> set[int]:
        return self.adapters.keys

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter on the device; return False if it does not exist."""
        self._check_open()
        adapter = self.adapters.of_key(lora_id)
        if adapter is not None:
            self._wait_loaded(adapter, pinned=True)
            self.adapters.pin(adapter.name)
        return adapter is not None

    def _load(self, lora_request: LoRARequest) -> NamedAdapter:
        found = self.adapters.resolve(lora_request)
        self._wait_loaded(found, found.pinned)
        self._retire(self.adapters.put(found))
        return found

    def _wait_loaded(self, adapter: NamedAdapter, pinned: bool) -> None:
        core = self.core
        if isinstance(core, EngineCore):
            core.adapters.load_now(adapter.ref, pinned)
        else:
            core.load_adapter(adapter.ref, pinned)

    def _retire(self, version: str | None) -> None:
        if version is not None:
            self.core.retire_adapter(version)

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(self.config, self.max_model_len)

    @property
    def vllm_config(self) -> VllmConfig:
        return VllmConfig.of(self.config, self.max_model_len)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `check_health` or `describe_rank` on every rank; return the answers in the order of ranks."""
        check_rank_call(method, args, kwargs)
        if timeout is not None:
            raise NotSupported(f"timeout is not supported by collective_rpc offline; got {timeout}. Leave it out.", "timeout")
        return self.call_all(method)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank of every engine; return the results in their order."""
        self._check_open()
        return self.core.call_all(method, *args)

    def has_unfinished_requests(self) -> bool:
        return len(self.outputs) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self.outputs)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can be asked for: generate, or pooling tasks."""
        return supported_tasks(self.config)

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was started with skip_tokenizer_init")
        return self.tokenizer

    def default_params(self) -> SamplingParams:
        """Return the model's sampling defaults (generation_config.json, then override_generation_config), or neutral ones."""
        return SamplingParams(**self.config.default_sampling)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached content. Return False, and forget nothing, while a request runs.

        reset_running_requests: running requests are preempted and computed again, so that nothing cached is left
        """
        refuse_connector(reset_connector)
        self._check_open()
        return self.core.reset_prefix_cache(reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Forget processed images and videos."""
        self.media.reset()

    def shutdown(self) -> None:
        """Stop the engine and give back its processes and memory, on the device too. Deleting the engine does the same."""
        self._stop()
        self._stop_media()
        if self.config.in_use is not None:
            self.config.in_use.end()

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise EngineDead("the engine has been shut down. Create another LLM or LLMEngine.")
