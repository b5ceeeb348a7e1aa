"""LLM: the offline API. Give it prompts, get answers, in order."""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from quire.beam import search_beams
from quire.config.args import EngineArgs
from quire.config.model_config import ModelConfig
from quire.features.media.inputs import options_of
from quire.features.media.requests import ADD_SPECIAL_TOKENS, check_tokenization, has_media
from quire.features.pooling.io_processor import open_io_processor
from quire.features.pooling.offline import PoolingMethods
from quire.features.profiling.control import LLMProfiles
from quire.llm_engine import LLMEngine
from quire.not_built import LLMNotBuilt
from quire.obs.offline import OfflineMetrics
from quire.progress import shown
from quire.step_loop import interrupts_between_steps, little_garbage_collection
from quire.text.inputs import PreparedRequest
from quire.text.prompts import ChatOptions, PromptReader, Tokenization
from quire.text.tokenizer import Tokenizer
from quire.types.adapter import LoRARequest
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.media import MODALITIES
from quire.types.outputs import BeamSearchOutput, RequestOutput
from quire.types.prompts import NO_EXTRAS, Extras, PromptType
from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.obs.offline import Metric

Messages = list[dict[str, Any]]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(PoolingMethods, LLMProfiles, LLMNotBuilt):
    """A model in this process, or data_parallel_size of them in processes of their own. Keyword arguments are those of
    EngineArgs (`quire plan --help=all` lists them). Calls from several threads run one after another."""

    def __init__(self, model: str = "smollm2", **engine_args: Any) -> None:
        self._start(EngineArgs.from_kwargs(**{"model": model, "disable_log_stats": True, **engine_args}))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        with shown(f"{args.model} is ready"):
            self.llm_engine = LLMEngine.from_engine_args(args)
        config, prompts = self.llm_engine.config, self.llm_engine.inputs.prompts
        self._io_processor = open_io_processor(config, prompts.max_model_len, prompts.tokenizer)
        self._ids = itertools.count()
        self._turn = threading.RLock()
        self._waiting: list[PreparedRequest] = []  # enqueued, and not waited for yet
        self._metrics = None if args.disable_log_stats else OfflineMetrics(self.llm_engine)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate text; return one RequestOutput per prompt, in order.

        Everything is checked before anything runs. A request that fails while running comes back with finish_reason
        "error" and its reason in `outputs[i].error`; the others are not touched. `tokenization_kwargs` set how prompts are
        tokenized: add_special_tokens, truncation, max_length ... (`text/prompts.py`). `lora_request`: the adapter of all
        prompts, or a list with one or None for each. A prompt brings images and videos as `multi_modal_data`;
        `mm_processor_kwargs` are options of the model's image processor for all of them.
        """
        prepared = self._prepare(prompts, sampling_params, priority, tokenization_kwargs, lora_request, mm_processor_kwargs)
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to one conversation or a list of them; return what `generate` does.

        `chat_template_content_format`: what the template gets as a message's content, "string", or "openai" for a list of
        parts; "auto": what it reads. Contents may have parts with PIL images: {"type": "image_pil", "image_pil": image}.
        """
        options = ChatOptions(
            chat_template, chat_template_content_format, add_generation_prompt, continue_final_message, tools,
            chat_template_kwargs, tokenization_kwargs,
        )  # fmt: skip
        prompts = self._render(messages, options, lora_request)
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs
        )

    def preprocess_chat(self, messages: Messages | Sequence[Messages], **options: Any) -> list[PromptType]:
        """Return the prompts that `chat` makes of conversations. options: those of `chat` from chat_template on."""
        return self._render(messages, ChatOptions(**options))

    def _render(
        self, messages: Messages | Sequence[Messages], options: ChatOptions, lora_request: Adapters = None
    ) -> list[PromptType]:
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = [cast(Messages, messages)] if single else cast(Sequence[Messages], messages)
        self.get_tokenizer()  # or there are no templates either
        adapters_add_tokens = self.llm_engine.config.adapter_tokens > 0  # adapters may have their own tokenizers
        reader = self.llm_engine.inputs.prompts
        extras = self._extras_for(lora_request if adapters_add_tokens else None, len(conversations))
        each = zip(conversations, extras, strict=True)
        return [self._render_one(reader.of(extra), one, options) for one, extra in each]

    def _render_one(self, reader: PromptReader, messages: Messages, options: ChatOptions) -> PromptType:
        media = self.llm_engine.media
        taken, refs = media.take(messages, local=True)
        how = Tokenization.of(options.tokenization_kwargs, add_special_tokens=False)
        check_tokenization(how if refs else None)
        [prompt] = reader.read_chats([taken], replace(options, media=media.marks))
        if not refs:
            return {"prompt": prompt.text or "", "prompt_token_ids": prompt.ids}
        data = {modality: [ref for ref in refs if ref.modality == modality] for modality in MODALITIES}
        given = {key: value for key, value in data.items() if value}
        chat = {"prompt": prompt.text or "", "multi_modal_data": given, ADD_SPECIAL_TOKENS: how.add_special_tokens}
        return cast(PromptType, chat)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Enqueue requests without running them; return their ids. `wait_for_completion` runs them."""
        prepared = self._prepare(prompts, sampling_params, priority, tokenization_kwargs, lora_request, mm_processor_kwargs)
        self._waiting += prepared
        return [one.id for one in prepared]

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[str]:
        """Enqueue conversations. options: those of `preprocess_chat`."""
        return self.enqueue(self.preprocess_chat(messages, **options), sampling_params)

    def wait_for_completion(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run all enqueued requests; return one RequestOutput for each, in order."""
        prepared, self._waiting = self._waiting, []
        return self._run(prepared, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best continuations of each prompt, best first; `concurrency_limit` prompts run at a time."""
        batch = _as_batch(prompts)
        extras = self._extras_for(lora_request, len(batch))
        if concurrency_limit is not None and (type(concurrency_limit) is not int or concurrency_limit < 1):
            raise InvalidParameter(f"concurrency_limit must be at least 1, got {concurrency_limit!r}", "concurrency_limit")
        size = concurrency_limit or max(1, len(batch))
        found: list[BeamSearchOutput] = []
        with self._turn:
            for i in range(0, len(batch), size):
                found += search_beams(self.llm_engine, batch[i : i + size], params, use_tqdm, extras[i : i + size])
        return found

    def close(self) -> None:
        """Stop the engine and give back its processes and memory, on the device too. `del llm` and `with LLM(...) as llm:` do
        the same. A closed LLM runs no requests; closing it again does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.get_tokenizer()

    @property
    def model_config(self) -> ModelConfig:
        return self.llm_engine.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own defaults (generation_config.json), or neutral ones."""
        return self.llm_engine.default_params()

    def get_metrics(self) -> "list[Metric]":
        """Return the server's Prometheus metrics as objects with vLLM's names. Counted only with disable_log_stats=False."""
        if self._metrics is None:
            raise NotSupported("nothing was counted: make the engine with LLM(..., disable_log_stats=False)", "get_metrics")
        return self._metrics.read()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks of all engines, or with include_dp=False of one engine."""
        config = self.llm_engine.config
        return config.world * (config.args.data_parallel_size if include_dp else 1)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `check_health` or `describe_rank` on every rank; return the answers in the order of ranks."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLMEngine.reset_prefix_cache`."""
        with self._turn:
            return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Forget processed images and videos."""
        self.llm_engine.reset_mm_cache()

    def _prepare(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: Adapters,
        mm_processor_kwargs: Mapping[str, Any] | None,
    ) -> list[PreparedRequest]:
        batch = _as_batch(prompts)
        how = Tokenization.of(tokenization_kwargs) if tokenization_kwargs else None
        params = self._params_for(sampling_params, len(batch))
        priorities = list(priority) if priority is not None else [0] * len(batch)
        if len(priorities) != len(batch):
            raise InvalidParameter(f"priority has {len(priorities)} entries for {len(batch)} prompts", "priority")
        extras = self._extras_for(lora_request, len(batch))
        if mm_processor_kwargs and not any(map(has_media, batch)):
            raise InvalidParameter("mm_processor_kwargs requires prompts with images or videos", "mm_processor_kwargs")
        read = self.llm_engine.read_media(batch, how, options_of(mm_processor_kwargs), extras)
        prepared = []
        for prompt, one, rank, extra in zip(read, params, priorities, extras, strict=True):
            ready = self.llm_engine.prepare(str(next(self._ids)), prompt, one, priority=rank, how=how, extras=extra)
            ready.params.output_kind = RequestOutputKind.FINAL_ONLY
            prepared.append(ready)
        return prepared

    def _extras_for(self, lora_request: Adapters, count: int) -> list[Extras]:
        if lora_request is None:
            return [NO_EXTRAS] * count
        adapters = list(lora_request) if isinstance(lora_request, list | tuple) else [cast(LoRARequest, lora_request)]
        if isinstance(lora_request, list | tuple) and len(adapters) != count:
            raise InvalidParameter(f"lora_request has {len(adapters)} entries for {count} prompts", "lora_request")
        with self._turn:  # an adapter may be loaded
            found = [self.llm_engine.extras_of(one) for one in adapters]
        return found if len(found) == count else found * count

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidParameter(f"sampling_params has {len(params)} entries for {count} prompts", "sampling_params")
        return list(params)

    def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        with self._turn:
            return self._run_in_turn(prepared, use_tqdm)

    def _run_in_turn(self, prepared: Sequence[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Run to the end; after an interruption (also Ctrl-C) no request of this call is left in the engine."""
        engine = self.llm_engine
        done: dict[str, RequestOutput] = {}
        try:
            bar = _Progress(len(prepared)) if use_tqdm else None
            with bar or nullcontext(), interrupts_between_steps() as check, little_garbage_collection():
                for one in prepared:
                    engine.submit(one)
                while len(done) < len(prepared):
                    check()
                    for output in engine.step_requests():
                        done[output.request_id] = output
                        if bar is not None:
                            bar.note(output)
        finally:
            if len(done) < len(prepared):
                engine.abort_request(one.id for one in prepared if one.id not in done)
        return [done[one.id] for one in prepared]


class _Progress:
    """A bar that counts prompts and shows tokens per second."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._read = self._written = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def note(self, output: RequestOutput) -> None:
        self._read += len(output.prompt_token_ids)
        self._written += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.postfix = f"input: {self._read / seconds:.1f} toks/s, output: {self._written / seconds:.1f} toks/s"
        self._bar.update(1)


def _as_batch(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return a list of prompts. A list of integers is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidParameter(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}", "prompts")
    batch = list(prompts)
    if batch and isinstance(batch[0], int):
        return [cast(PromptType, batch)]
    return cast(list[PromptType], batch)
