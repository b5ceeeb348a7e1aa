"""LLMEngine: the text half and an engine core in this process, stepped by the caller.

prompt ─► InputProcessor ─► EngineCore.add ... EngineCore.step ─► TokenDelta ─► OutputProcessor ─► RequestOutput
"""

import logging
import time
import warnings
from collections.abc import Iterable
from typing import Any

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.model_config import ModelConfig
from quire.engine.assemble import resolve_here, start_core
from quire.engine.core import EngineCore
from quire.engine.timeline import Stopwatch
from quire.grammar.schema import unenforced
from quire.progress import doing
from quire.text.inputs import InputProcessor, PreparedRequest, read_extras
from quire.text.open import open_tokenizer
from quire.text.outputs import OutputProcessor
from quire.text.tokenization import Tokenization
from quire.text.tokenizer import Tokenizer
from quire.types.errors import RequestError
from quire.types.outputs import RequestOutput
from quire.types.prompts import NO_EXTRAS, Extras, PromptType
from quire.types.sampling import SamplingParams

logger = logging.getLogger(__name__)


class LLMEngine:
    def __init__(self, config: Config, watch: Stopwatch | None = None) -> None:
        watch = watch or Stopwatch()
        self.config = config
        with doing("reading the tokenizer"):
            self.tokenizer = open_tokenizer(config)
        watch.lap("tokenizer")
        started = start_core(config, watch)
        self.core: EngineCore = started.core
        self.timeline = started.timeline
        self.max_model_len = started.max_model_len
        self.inputs = InputProcessor.of(config, self.tokenizer, self.max_model_len)
        self.outputs = OutputProcessor(self.tokenizer, page_size=config.page_size if config.prefix_caching else 0)
        logger.info("ready after %s", self.timeline)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        watch = Stopwatch.of_engine("until the call")
        return cls(resolve_here(args, watch), watch)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> None:
        """Checks and queues one request; a RequestError leaves the engine as it was."""
        extras = read_extras(lora_request)
        self.submit(self.prepare(request_id, prompt, params, arrival_time, priority, extras=extras))

    def prepare(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        how: Tokenization | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> PreparedRequest:
        arrival = time.time() if arrival_time is None else arrival_time
        prepared = self.inputs.prepare(request_id, prompt, params, arrival=arrival, priority=priority, how=how, extras=extras)
        if prepared.params.structured_outputs is not None:
            self.core.constraints.check(prepared.params.structured_outputs)
            if keywords := unenforced(prepared.params.structured_outputs):
                told = ", ".join(keywords)
                warnings.warn(f"the answer is not held to everything that its JSON schema says, not to {told}", stacklevel=2)
        return prepared

    def submit(self, prepared: PreparedRequest) -> None:
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

    def step(self) -> list[RequestOutput]:
        """One turn of the loop. Requests whose text hit a stop string are ended in the engine as well."""
        processed = self.outputs.process(self.core.step())
        if processed.aborts:
            self.core.abort(processed.aborts)
        return processed.outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests at once; they give no further output. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.core.abort([inner for request_id in ids for inner in self.outputs.forget(request_id)])

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(self.config, self.max_model_len)

    def has_unfinished_requests(self) -> bool:
        return len(self.outputs) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self.outputs)

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was started with skip_tokenizer_init")
        return self.tokenizer

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json, then override_generation_config), or neutral ones."""
        return SamplingParams(**self.config.default_sampling)

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def shutdown(self) -> None:
        self.core.stop()
