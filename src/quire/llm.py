"""LLM: the offline API. Give it prompts, get answers, in order."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

from tqdm import tqdm

from quire.beam import search_beams
from quire.config.args import EngineArgs
from quire.garbage import little_garbage_collection
from quire.interrupt import interrupts_between_steps
from quire.llm_engine import LLMEngine
from quire.progress import shown
from quire.text.inputs import Prepared
from quire.text.tokenizer import Tokenizer
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.outputs import BeamSearchOutput, RequestOutput
from quire.types.prompts import PromptType
from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

Messages = list[dict[str, Any]]


class LLM:
    """A model in this process. Keyword arguments are those of EngineArgs (`quire plan --help` lists them)."""

    def __init__(self, model: str = "smollm2", **engine_args: Any) -> None:
        self._start(EngineArgs.from_kwargs(model=model, **engine_args))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLM":
        llm = cls.__new__(cls)
        llm._start(args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        with shown(f"{args.model} is ready"):
            self.llm_engine = LLMEngine.from_engine_args(args)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order.

        Everything is checked before anything runs. A request that fails while running comes back with finish_reason
        "error" and its reason in `outputs[i].error`; the others are not touched.
        """
        if lora_request is not None:
            raise NotSupported("lora_request cannot be used: LoRA adapters are not available yet", "lora_request")
        batch = _as_batch(prompts)
        params = self._params_for(sampling_params, len(batch))
        priorities = list(priority) if priority is not None else [0] * len(batch)
        if len(priorities) != len(batch):
            raise InvalidParameter(f"priority has {len(priorities)} entries for {len(batch)} prompts", "priority")
        prepared = []
        for prompt, one, rank in zip(batch, params, priorities, strict=True):
            ready = self.llm_engine.prepare(str(next(self._ids)), prompt, one, priority=rank)
            ready.params.output_kind = RequestOutputKind.FINAL_ONLY
            prepared.append(ready)
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Like generate, for one conversation or a list of them."""
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = [cast(Messages, messages)] if single else cast(Sequence[Messages], messages)
        tokenizer = self.get_tokenizer()
        prompts: list[PromptType] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first."""
        return search_beams(self.llm_engine, _as_batch(prompts), params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (generation_config.json), or neutral ones."""
        return self.llm_engine.default_params()

    def reset_prefix_cache(self) -> bool:
        return self.llm_engine.reset_prefix_cache()

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidParameter(f"sampling_params has {len(params)} entries for {count} prompts", "sampling_params")
        return list(params)

    def _run(self, prepared: Sequence[Prepared], use_tqdm: bool) -> list[RequestOutput]:
        """Runs to the end; whatever interrupts it (Ctrl-C too), no request of this call stays behind."""
        engine = self.llm_engine
        done: dict[str, RequestOutput] = {}
        try:
            with _progress(len(prepared), use_tqdm) as bar, interrupts_between_steps() as check, little_garbage_collection():
                for one in prepared:
                    engine.submit(one)
                while len(done) < len(prepared):
                    check()
                    for output in engine.step():
                        done[output.request_id] = output
                        bar.note(output)
        finally:
            engine.abort_request(one.id for one in prepared if one.id not in done)
        return [done[one.id] for one in prepared]


class _progress:  # noqa: N801  used as a context manager
    """A bar that counts prompts and shows tokens per second."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not enabled, dynamic_ncols=True)
        self._read = self._written = 0

    def __enter__(self) -> "_progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def note(self, output: RequestOutput) -> None:
        self._read += len(output.prompt_token_ids)
        self._written += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.postfix = f"input: {self._read / seconds:.1f} toks/s, output: {self._written / seconds:.1f} toks/s"
        self._bar.update(1)


def _as_batch(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or many? A list of integers is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidParameter(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}", "prompts")
    batch = list(prompts)
    if batch and isinstance(batch[0], int):
        return [cast(PromptType, batch)]
    return cast(list[PromptType], batch)
