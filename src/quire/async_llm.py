"""AsyncLLM: the text half in this process, the engine in another one, and answers as async generators.

    prompt ─► InputProcessor ─► EngineClient ═ engine process ═► deltas ─► OutputProcessor ─► one Stream per request

With data_parallel_size there are several such processes, and an `EngineRouter`.

An engine that dies is restarted, and its requests go on where they were; clients see a pause. All state belongs to one
event loop, the one in use; work on texts leaves it for threads and processes (`text/offload.py`). Does not import torch.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.model_config import ModelConfig, VllmConfig
from quire.config.resolve import resolve
from quire.device.registry import describe_unseen
from quire.engine import ipc
from quire.engine.child import COMMAND
from quire.engine.client import as_started
from quire.engine.handle import EngineHandle, EngineListener, EngineStatus, EngineView, OneEngine, State, check_rank_call
from quire.engine.router import start_engines
from quire.engine.timeline import Timeline
from quire.features.lora.client import AdapterClient, AdapterNames, Sharing
from quire.features.media.reader import MediaReader
from quire.features.media.requests import AsyncMedia, has_media, without_media
from quire.features.pooling.host import supported_tasks
from quire.features.pooling.requests import pooling_output, pools_tokens, prepare_pooling
from quire.features.profiling.control import AsyncProfiles
from quire.not_built import AsyncLLMNotBuilt, refuse_connector
from quire.proc.fork_server import LazyForkServer
from quire.stat_loggers import StatLoggers, make_stat_loggers
from quire.text.inputs import InputProcessor, PreparedRequest, is_quick
from quire.text.offload import TextOffload
from quire.text.outputs import OutputProcessor, RequestAnswer, Stream, catch_up
from quire.text.prompts import Tokenization
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import open_tokenizer
from quire.types.adapter import LoRARequest
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import AdapterChanged, EngineDead, EngineError, NotSupported, QuireError, RequestError
from quire.types.outputs import RequestOutput, TokenDelta
from quire.types.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.prompts import NO_EXTRAS, Extras, Prompt, PromptType
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.stats import Observer, Stats, together

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
SHUTDOWN_TIMEOUT_S = 5.0


class AsyncLLM(EngineView, AsyncProfiles, AsyncMedia, AsyncLLMNotBuilt):
    """Construction starts the engine process and returns; `wait_ready` waits until it takes requests.

    `config` is complete when the engine is ready: until then, what depends on the device is a guess.
    `connect`: connects to engines of another process instead of starting them; `name` is then the prefix of request ids.
    """

    def __init__(
        self,
        config: Config,
        command: Sequence[str] = COMMAND,
        fork_server: LazyForkServer | None = None,
        connect: Callable[[EngineListener], EngineHandle] | None = None,
        name: str = "",
        share: Callable[[AdapterNames], Sharing] | None = None,
    ) -> None:
        self.config = config
        self.observers: list[Observer] = []
        self.stat_loggers: StatLoggers | None = None
        self.stats: Stats | None = None  # as of the latest step
        self.pages = 0  # of the cache; 0 until the engine is ready
        self.timeline: Timeline | None = None  # of the latest start of the engine process
        self._viewer: Callable[[EngineSnapshot], None] | None = None
        vocabulary = config.facts.vocab_size if config.adapter_tokens else None
        self.adapters = AdapterNames(
            config.max_loras > 0, vocabulary, lambda ref: self.prompts.open_tokenizer(ref), config.adapter_bounds
        )
        self._lengths: dict[int, int] = {}  # engine -> the longest context that its cache has room for
        self._name = name
        self._client: EngineHandle = start_engines(config, self, command, fork_server) if connect is None else connect(self)
        self._adapters = AdapterClient(self.adapters, self.engines, None if share is None else share(self.adapters))
        try:
            self.tokenizer = open_tokenizer(config)
        except BaseException:
            self._client.stop(0.0)
            raise
        self.offload = TextOffload(config, self.tokenizer)
        self.media = MediaReader(config, self.tokenizer)
        self._inputs = InputProcessor.of(config, self.tokenizer, config.max_model_len, self.offload, self.media.placeholders)
        self.prompts = self._inputs.prompts
        self._outputs = OutputProcessor(self.tokenizer, self.observers)
        self._streams: dict[str, Stream] = {}  # by the user's request id
        self._fresh: list[EngineRequest] = []  # to be sent when all that happen now have been opened
        self._serials = itertools.count()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,  # noqa: ARG003
        stat_loggers: Sequence[Any] | None = None,
        *,
        fork_server: LazyForkServer | None = None,
    ) -> "AsyncLLM":
        """The model is found (and fetched) here; it is loaded in the engine process. The device is decided there, too.

        usage_context: caller metadata of vLLM's usage statistics, which Quire does not collect
        fork_server: of the engines, which was prepared ahead
        """
        if not start_engine_loop:
            raise NotSupported("start_engine_loop must be True; got False. Leave it out.", "start_engine_loop")
        config = resolve(engine_args, lambda: "cpu", describe_unseen)
        loggers = make_stat_loggers(config, stat_loggers)
        made = cls(config, fork_server=fork_server)
        made.add_stat_loggers(loggers)
        return made

    def add_stat_loggers(self, loggers: StatLoggers | None) -> None:
        """Call these loggers from now on."""
        self.stat_loggers = loggers
        if loggers is not None:
            self.observers.append(loggers)
            for engine in self._lengths:  # those that are ready
                loggers.on_ready(engine)

    # ---- how it is ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        """Of all engines as one."""
        return self._client.status

    @property
    def state(self) -> State:
        return self._client.state

    @property
    def engines(self) -> Sequence[OneEngine]:
        """Each engine; the other properties are of all engines together."""
        return self._client.engines

    @property
    def engine_pid(self) -> int | None:
        return self.status.pid

    @property
    def num_open(self) -> int:
        """Requests that are not finished."""
        return len(self._outputs)

    @property
    def open_ids(self) -> list[str]:
        """Return the ids of requests that are not finished."""
        return list(self._streams)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: generate, or pooling tasks."""
        return supported_tasks(self.config)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.supported_tasks

    @property
    def max_model_len(self) -> int:
        return self.prompts.max_model_len

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Return default SamplingParams fields: the model's, then those of override_generation_config."""
        return self.config.default_sampling

    async def wait_ready(self) -> None:
        """Raises why the engine could not start (ConfigError, ModelError, ...), or EngineDead."""
        self._attend()
        await self._client.wait_ready()

    async def check_health(self) -> None:
        """Raises EngineDead if there is no engine and never will be again."""
        self._attend()
        self._client.check()

    @property
    def is_running(self) -> bool:
        """An engine that is being started or restarted counts as running: its requests wait."""
        return self.state != "dead"

    @property
    def errored(self) -> bool:
        return self.state == "dead"

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineDead:
        """The error of a request to an engine that is dead."""
        try:
            self._client.check()
        except EngineDead as error:
            return error
        return EngineDead(f"the engine is {self.state}")

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(self.config, self.max_model_len)

    @property
    def vllm_config(self) -> VllmConfig:
        return VllmConfig.of(self.config, self.max_model_len)

    async def get_model_config(self) -> ModelConfig:
        return self.model_config

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    async def is_tracing_enabled(self) -> bool:
        """Traces are written by `quire serve`, which adds an observer, not by this class."""
        return False

    async def do_log_stats(self) -> None:
        """Log the latest step's counts."""
        if (stats := self.stats) is not None:
            used = 100 * (1 - stats.free_pages / stats.pages) if stats.pages else 0.0
            logger.info("Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%", stats.running, stats.waiting, used)
        if self.stat_loggers is not None:
            self.stat_loggers.log()

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request is open. Raises TimeoutError after `drain_timeout` seconds."""
        deadline = time.monotonic() + drain_timeout
        while self.num_open:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self.num_open} requests are still open after {drain_timeout} s; abort them or wait longer"
                )
            await asyncio.sleep(DRAIN_POLL_S)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `check_health` or `describe_rank` on every rank; return the answers in the order of engines and ranks.

        timeout: seconds after which TimeoutError is raised
        """
        check_rank_call(method, args, kwargs)
        return await asyncio.wait_for(self.call_all(method), timeout)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank of every engine; return the results in their order."""
        self._attend()
        return list(await self._client.call("call_all", method, *args))

    # ---- requests -------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType | Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_tenant: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        at_once: bool = False,
        data_parallel_rank: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs (which ones: sampling_params.output_kind), the last one with `finished`.

        A bad request raises RequestError before the first output. Leaving the generator ends the request in the engine.
        `lora_request` is loaded if it is new; a `Prompt` may bring its adapter along.
        Requests that come in the same turn of the event loop begin together, but for those that are sent `at_once`.
        `data_parallel_rank`: of several engines, the one that is to have it. `tokenization_kwargs`: as in `LLM.generate`.
        """
        arrived = time.monotonic()
        if self.state == "starting":
            await self.wait_ready()
        self._attend()
        self._client.check(data_parallel_rank)
        extras = NO_EXTRAS if lora_request is None else (await self._adapters.use(lora_request)).extras
        how = Tokenization.of(tokenization_kwargs) if tokenization_kwargs else None
        if has_media(prompt):
            prompt = await self._read_media(cast(Mapping[str, Any], prompt), how, extras)
        prompt = without_media(prompt)
        prepared = await self._prepare(prompt, sampling_params, request_id, priority, cache_tenant, extras, how)
        stream = self._open(on_engine(prepared, data_parallel_rank), trace_headers, arrived, at_once)
        try:
            answer, finished = stream.answer, False
            while not finished:
                while not answer.due:
                    await stream.news()
                if answer.behind:
                    await catch_up(answer)
                output = answer.emit()
                finished = output.finished
                yield output
        finally:
            self._close(request_id, stream)

    async def encode(
        self,
        prompt: PromptType | Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_tenant: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the pooled values of a prompt, once. A request that failed has an `error`.

        The rest is as in `generate`.
        """
        arrived = time.monotonic()
        if self.state == "starting":
            await self.wait_ready()
        self._attend()
        self._client.check(data_parallel_rank)
        extras = NO_EXTRAS if lora_request is None else (await self._adapters.use(lora_request)).extras
        how = Tokenization.of(tokenization_kwargs) if tokenization_kwargs else None
        serial = f"{self._name}{next(self._serials):x}"
        prepare = partial(
            prepare_pooling, self._inputs, request_id, prompt, pooling_params, arrival=time.time(), how=how, priority=priority,
            tenant=cache_tenant, engine_id=serial, extras=extras,
        )  # fmt: skip
        prepared = prepare() if is_quick(prompt, SamplingParams()) else await self.offload.thread(prepare)
        stream = self._open(on_engine(prepared, data_parallel_rank), trace_headers, arrived, False)
        try:
            while not stream.answer.due:
                await stream.news()
            yield pooling_output(stream.answer.emit(), pools_tokens(prepared))
        finally:
            self._close(request_id, stream)

    def unread_bytes(self, request_id: str) -> int:
        """Return about how much memory the outputs of a request take that its generator has not been asked for."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else stream.answer.unread_bytes

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests now; their generators give a last output with finish_reason "abort". Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            names = self._outputs.engine_ids(name)
            self._client.abort(names)
            answer = self._outputs.owner(names[0]) if names else None
            engine = 0 if answer is None else answer.engine
            self.on_deltas([TokenDelta(engine_id, [], "abort") for engine_id in names], engine)

    def stop_choice(self, request_id: str, index: int) -> None:
        """End one choice of a request in the engine now, with finish_reason "stop": its answer is complete."""
        engine_id = self._outputs.choice_id(request_id, index)
        answer = None if engine_id is None else self._outputs.owner(engine_id)
        if engine_id is not None and answer is not None:
            self._client.abort([engine_id])
            self.on_deltas([TokenDelta(engine_id, [], "stop")], answer.engine)

    def watch(self, viewer: Callable[[EngineSnapshot], None] | None) -> None:
        """Pass snapshots of the engine to `viewer`. Without a viewer the engine makes none."""
        self._viewer = viewer
        self._client.watch(viewer is not None)

    def owner(self, engine_id: str) -> RequestAnswer | None:
        """Whose open request this request of the engine is."""
        return self._outputs.owner(engine_id)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached content. Return False, and forget nothing, while a request runs.

        reset_running_requests: running requests are preempted and computed again, so that nothing cached is left
        """
        refuse_connector(reset_connector)
        self._attend()
        return bool(await self._client.call("reset_prefix_cache", reset_running_requests))

    # ---- adapters -------------------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest, only_new: bool = False) -> bool:
        """Loads an adapter before anybody asks for it, or again (`load_inplace`): requests that have begun keep what they
        have. Raises why it cannot be loaded (`only_new`: also that it is there); nothing has changed then."""
        self._attend()
        return bool(await self._adapters.use(lora_request, only_new))

    async def remove_lora(self, lora_id: int) -> bool:
        """False if there is none. Requests that have begun with it go on."""
        return await self._adapters.remove(lora_id)

    def adapters_in_use(self) -> tuple[int, list[str], list[str]]:
        """How many there may be on the device, and the names of those that open requests wait for and run with."""
        return self.config.max_loras, *self._outputs.adapters()

    async def list_loras(self) -> set[int]:
        return self.adapters.keys

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter on the device. False if there is none."""
        self._attend()
        return await self._adapters.pin(lora_id)

    # ---- text -----------------------------------------------------------------------------------------------------------

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _, ids = await self.offload.encode(text, add_special_tokens)
        assert ids is not None
        return ids

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return await self.offload.decode(ids, skip_special_tokens)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation and its tokens; the options are those of `TextOffload.render`."""
        text, _, ids = await self.offload.render(messages, add_special_tokens=add_special_tokens, **options)
        assert ids is not None
        return text, ids

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was started with skip_tokenizer_init")
        return self.tokenizer

    # ---- the end --------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine process, kindly for up to `timeout` (5) seconds. Open requests get a last output with "abort".

        Call it on the event loop in use, or when there is none any more. A second call does nothing.
        """
        self._client.stop(SHUTDOWN_TIMEOUT_S if timeout is None else timeout)
        self._adapters.stop()
        self.offload.stop()
        self.media.stop()
        if self.config.in_use is not None:
            self.config.in_use.end()
        task, self._task = self._task, None
        if task is not None and not task.get_loop().is_closed():
            task.cancel()

    # ---- events of the engine (called by the client) --------------------------------------------------------------------

    def on_ready(self, ready: ipc.Ready, engine: int = 0) -> None:
        self.config = as_started(self.config, ready)
        self._outputs.page_size = ready.page_size if self.config.prefix_caching else 0
        self._lengths[engine] = ready.max_model_len
        self.prompts.max_model_len = min(self._lengths.values())
        self.pages = sum(each.pages for each in self.engines)
        self.timeline = ready.timeline
        if self.stat_loggers is not None:
            self.stat_loggers.on_ready(engine)
        self._adapters.pin_again(engine)

    def on_deltas(self, deltas: Sequence[TokenDelta], engine: int = 0) -> None:
        absorbed = self._outputs.absorb(deltas, engine)
        for answer in absorbed.due:
            self._streams[answer.prepared.id].wake()
        if absorbed.aborts:
            self._client.abort(absorbed.aborts)

    def on_step(self, report: ipc.StepReport, engine: int = 0) -> None:
        stats = self.stats = report.stats
        if len(self.engines) > 1:
            stats = msgspec.structs.replace(stats, engine=engine)
            self.stats = together([each.stats for each in self.engines if each.stats is not None])
        now = time.monotonic()
        for observer in self.observers:
            try:
                observer.on_step(stats, report.tokens, now)
            except Exception:
                logger.exception("an observer failed")

    def on_snapshot(self, snapshot: EngineSnapshot, engine: int = 0) -> None:
        if self._viewer is not None:
            snapshot.engine = engine
            try:
                self._viewer(snapshot)
            except Exception:
                logger.exception("a viewer failed")

    def on_refused(self, engine_id: str, error: QuireError) -> None:
        name = self._outputs.user_id(engine_id)
        if name is not None:
            if isinstance(error, AdapterChanged) and self._send_again(name, engine_id):
                return
            self._client.abort(self._outputs.forget(name))
            self._streams[name].fail(error)

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _send_again(self, name: str, engine_id: str) -> bool:
        """A request that waited for a version of its adapter that was replaced meanwhile gets the one that is there now."""
        answer = self._streams[name].answer
        [request] = [each for each in answer.prepared.requests if each.id == engine_id]
        renewed = None if answer.metrics.first_token_ts else self._adapters.renewed(request)
        if renewed is not None:
            self._client.add([renewed])
        return renewed is not None

    async def _prepare(
        self,
        prompt: PromptType | Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        tenant: str | None,
        extras: Extras,
        how: Tokenization | None,
    ) -> PreparedRequest:
        """The engine gets numbers for ids: a user may use an id again while the engine still talks of its last bearer."""
        arrival, serial = time.time(), f"{self._name}{next(self._serials):x}"

        def prepare() -> PreparedRequest:
            return self._inputs.prepare(
                request_id, prompt, params, arrival=arrival, how=how, priority=priority, tenant=tenant, engine_id=serial,
                extras=extras,
            )  # fmt: skip

        return prepare() if is_quick(prompt, params) else await self.offload.thread(prepare)

    def _open(
        self, prepared: PreparedRequest, trace_headers: Mapping[str, str] | None, arrived: float, at_once: bool
    ) -> Stream:
        if prepared.id in self._streams:
            raise RequestError(f"request id {prepared.id!r} is in use", "request_id")
        self._client.check()
        if at_once:  # the engine begins while we get ready for its answer
            self._client.add(prepared.requests)
        try:
            stream = self._streams[prepared.id] = Stream(self._outputs.add(prepared, trace_headers, arrived))
        except BaseException:
            self._client.abort([request.id for request in prepared.requests])
            raise
        if not at_once:
            if not self._fresh:
                asyncio.get_running_loop().call_soon(self._submit)
            self._fresh += prepared.requests
        return stream

    def _submit(self) -> None:
        """Requests that came at the same time go to the engine as one message; those that have been left already do not go."""
        fresh, self._fresh = self._fresh, []
        open_requests = [request for request in fresh if self._outputs.user_id(request.id) is not None]
        try:
            self._client.add(open_requests)
        except Exception as error:
            refusal = error if isinstance(error, QuireError) else EngineError(f"{type(error).__name__}: {error}")
            for request in open_requests:
                self.on_refused(request.id, refusal)

    def _close(self, request_id: str, stream: Stream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._client.abort(self._outputs.forget(request_id))

    def _attend(self) -> None:
        """Makes sure that the engine is listened to, on the event loop in use."""
        loop = asyncio.get_running_loop()
        if self.state != "dead" and (self._task is None or self._task.done() or self._task.get_loop() is not loop):
            self._task = loop.create_task(self._client.run(), name="quire-supervisor")


def on_engine(prepared: PreparedRequest, engine: int | None) -> PreparedRequest:
    """Return the request for one of several engines; None: for any."""
    if engine is None:
        return prepared
    return replace(prepared, requests=tuple(replace(one, engine=engine) for one in prepared.requests))


AsyncLLMEngine = AsyncLLM
AsyncEngineArgs = EngineArgs
