"""IO processors: code of other packages that turns data of any kind into prompts, and the pooled values into an answer.

    data ─► parse_data ─► pre_process ─► prompts ─► the model ─► post_process ─► answer

`io_processor_plugin` (or `io_processor_plugin` in config.json) names an entry point of the group `quire.io_processors` or
`vllm.io_processor_plugins`: a subclass of `IOProcessor`, or a function that returns one or its qualified name.
"""

import asyncio
import importlib
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quire.config.model_config import VllmConfig
from quire.config.plugins import IO_PROCESSORS, PlugIn, find_plugins
from quire.features.pooling.host import check_io_processor, pooling_of
from quire.text.prompts import PromptReader
from quire.types.errors import ConfigError, InvalidParameter, RequestError
from quire.types.pooling import IO_PROCESSOR_TASK, PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.prompts import NO_EXTRAS, Extras, Prompt, PromptType

if TYPE_CHECKING:
    from quire.config.config import Config
    from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
IOProcessorInput = TypeVar("IOProcessorInput")
IOProcessorOutput = TypeVar("IOProcessorOutput")
T = TypeVar("T")
Results = Sequence[PoolingRequestOutput[PoolingOutput]]


class Renderer:
    """What an IO processor gets of the engine's text half."""

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        self.tokenizer = tokenizer

    def get_tokenizer(self) -> "Tokenizer | None":
        return self.tokenizer


class IOProcessor(Generic[IOProcessorInput, IOProcessorOutput]):
    """vLLM's interface. One object serves all requests. `post_process` gets what `parse_data` returned as `prompt`, if it takes
    that argument.

    Methods that are not coroutines run in a thread. ValueError, TypeError and LookupError of the first three are the client's
    errors.
    """

    def __init__(self, vllm_config: VllmConfig, renderer: Renderer | None = None) -> None:
        self.vllm_config, self.renderer = vllm_config, renderer

    def parse_data(self, data: Any) -> IOProcessorInput:
        """Check the data of a request and return what `pre_process` takes."""
        return self.parse_request(data)

    def parse_request(self, request: Any) -> IOProcessorInput:
        """The older name of `parse_data`."""
        raise NotImplementedError(f"{type(self).__name__} must have parse_data")

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Return the parameters of all prompts. params: those of the caller; None: there are none"""
        return self.validate_or_generate_params(params)

    def validate_or_generate_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """The older name of `merge_pooling_params`."""
        return params or PoolingParams()

    def pre_process(
        self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any
    ) -> PromptType | Sequence[PromptType]:
        """Return the prompts of a request."""
        raise NotImplementedError(f"{type(self).__name__} must have pre_process")

    async def pre_process_async(
        self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any
    ) -> PromptType | Sequence[PromptType]:
        return await asyncio.to_thread(self.pre_process, prompt, request_id, **kwargs)

    def post_process(self, model_output: Results, request_id: str | None = None, **kwargs: Any) -> IOProcessorOutput:
        """Return the answer, made of the values of all prompts in their order."""
        raise NotImplementedError(f"{type(self).__name__} must have post_process")

    async def post_process_async(
        self,
        model_output: AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> IOProcessorOutput:
        numbered = [each async for each in model_output]
        ordered = [output for _, output in sorted(numbered, key=lambda each: each[0])]
        return await asyncio.to_thread(self.post_process, ordered, request_id, **kwargs)


class LoadedProcessor:
    """An IO processor and the plug-in that it comes from, which errors name."""

    def __init__(self, plugin: PlugIn, processor: IOProcessor[Any, Any]) -> None:
        self._plugin, self._processor = plugin, processor
        self._takes_prompt = _takes_prompt(processor.post_process) and _takes_prompt(processor.post_process_async)

    @property
    def name(self) -> str:
        return self._plugin.name

    def begin(self, data: Any, params: PoolingParams | None) -> tuple[Any, PoolingParams]:
        """Return what `pre_process` takes, and the parameters of the prompts. Raise InvalidParameter for bad data."""
        parsed = self._of_client(lambda: self._processor.parse_data(data))
        merged = self._of_client(lambda: self._processor.merge_pooling_params(params))
        if not isinstance(merged, PoolingParams):
            raise self._broken(f"merge_pooling_params must return PoolingParams; got {type(merged).__name__}")
        return parsed, replace(merged, task=None) if merged.task == IO_PROCESSOR_TASK else merged

    def pre_process(self, parsed: Any, reader: PromptReader, request_id: str | None) -> list[Prompt]:
        found = self._of_client(lambda: self._processor.pre_process(parsed, request_id))
        return self._read(found, reader, NO_EXTRAS)

    async def pre_process_async(self, parsed: Any, reader: PromptReader, extras: Extras, request_id: str) -> list[Prompt]:
        try:
            with self._plugin.blamed():
                found = await self._processor.pre_process_async(parsed, request_id)
        except ConfigError as error:
            raise self._clients_error(error) from error
        return await asyncio.to_thread(self._read, found, reader, extras)

    def post_process(self, outputs: Results, parsed: Any, request_id: str | None) -> Any:
        with self._plugin.blamed():
            return self._processor.post_process(outputs, request_id, **self._more(parsed))

    async def post_process_async(self, outputs: Results, parsed: Any, request_id: str) -> Any:
        async def numbered() -> AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None]:
            for each in enumerate(outputs):
                yield each

        with self._plugin.blamed():
            return await self._processor.post_process_async(numbered(), request_id, **self._more(parsed))

    def _more(self, parsed: Any) -> dict[str, Any]:
        return {"prompt": parsed} if self._takes_prompt else {}

    def _of_client(self, work: Callable[[], T]) -> T:
        try:
            with self._plugin.blamed():
                return work()
        except ConfigError as error:
            raise self._clients_error(error) from error

    def _clients_error(self, error: ConfigError) -> Exception:
        """Return the error of bad data if that is what the processor raised, else the error itself."""
        cause = error.__cause__
        if isinstance(cause, RequestError):
            return cause
        if isinstance(cause, ValueError | TypeError | LookupError):
            return InvalidParameter(f"data is not valid for the IO processor {self.name!r}: {cause}", "data")
        return error

    def _read(self, found: Any, reader: PromptReader, extras: Extras) -> list[Prompt]:
        one_prompt = isinstance(found, str | dict) or (isinstance(found, list) and found and isinstance(found[0], int))
        prompts = [found] if one_prompt else found
        if not isinstance(prompts, Sequence) or not prompts:
            raise self._broken(f"pre_process must return a prompt or a list of prompts; got {found!r:.80}")
        return [reader.read(prompt, None, extras) for prompt in prompts]

    def _broken(self, why: str) -> ConfigError:
        return ConfigError(f"{self._plugin} cannot be used: {why}")


def _takes_prompt(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    return "prompt" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def open_io_processor(config: "Config", max_model_len: int, tokenizer: "Tokenizer | None") -> LoadedProcessor | None:
    """Return the IO processor that the arguments or config.json name; None: they name none.

    One that only config.json names may be missing.
    """
    if pooling_of(config) is None:
        return None
    name = config.args.io_processor_plugin or config.facts.hf.get("io_processor_plugin")
    if name is None:
        return None
    plugin = find_plugins(IO_PROCESSORS).get(name)
    if plugin is None:
        check_io_processor(config.args.io_processor_plugin)
        logger.warning("config.json names the IO processor %r, which is not installed: requests with data are refused", name)
        return None
    kind = _class_of(plugin)
    with plugin.blamed():
        given = VllmConfig.of(config, max_model_len), Renderer(tokenizer)
        count = len(inspect.signature(kind).parameters)  # older ones take the configuration only
        return LoadedProcessor(plugin, plugin.run(lambda: kind(*given[:count])))


def _class_of(plugin: PlugIn) -> Callable[..., IOProcessor[Any, Any]]:
    found = plugin.load()
    if not isinstance(found, type):
        found = plugin.run(found)
    with plugin.blamed():
        if isinstance(found, str):
            module, _, attribute = found.partition(":") if ":" in found else found.rpartition(".")
            found = getattr(importlib.import_module(module), attribute)
        if not (isinstance(found, type) and issubclass(found, IOProcessor)):
            raise ConfigError("it must be a subclass of IOProcessor, or a function that returns its qualified name")
    return found
