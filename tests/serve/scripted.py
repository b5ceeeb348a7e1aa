"""A server whose model says what the test wants: real tokenizer, real detokenization, real HTTP app; no engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from patience import PATIENCE
from quire.config.args import EngineArgs
from quire.config.facts import DeviceFacts
from quire.config.server_args import ServerArgs
from quire.features.lora.client import AdapterNames
from quire.features.media.reader import MediaReader
from quire.files.resolve import ModelFiles
from quire.obs.metrics import Metrics
from quire.serve.app import build_app
from quire.text.inputs import InputProcessor
from quire.text.outputs import OutputProcessor
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import read_tokenizer
from quire.text.tool_prompt import render_described
from quire.text.workers.wire import Cut, Parse
from quire.types.outputs import RequestOutput, TokenDelta
from quire.types.plan import TopLogprobs
from quire.types.sampling import SamplingParams

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}]{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}</s>{% endfor %}"
    "{% if tools %}<tools>{{ tools | map(attribute='function.name') | join(',') }}</tools>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined %}{{ think }}{% endif %}{% endif %}"
)
# special in the tokenizers of the models that use them
SPECIALS = (
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|tool_call|>", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>", "<|call|>", "<|constrain|>", "<|python_start|>", "<|python_end|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>",
    "｜DSML｜",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<start_function_call>", "<end_function_call>",
    "<escape>", "<|tool_call_start|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|action_start|>", "<|action_end|>", "<|plugin|>",
    "<|open|>", "<|close|>", "<|sep|>", "<|tool_call:start|>", "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:value|>",
    "<|tool_arg:end|>", "<|think:start|>", "<|think:end|>", "<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>",
    "<|inner_suffix|>", "<|message_sep|>", "<|role_sep|>", "<|function_call|>", "<|message_model|>", "<|content_text|>",
    "<|content_thinking|>", "<|content_invoke_tool_json|>", "<|end_message|>", "<|content_model_end_sampling|>", "<|eom|>",
    "<|eot|>",
)  # fmt: skip
WHOLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # one token each, but not special


def byte_tokenizer(directory: Path, template: str = TEMPLATE) -> Tokenizer:
    """Every byte is a token, and so is every marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in ("<bos>", "<eos>", *SPECIALS)])
    fast.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in WHOLE])
    fast.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return read_tokenizer(directory)


class ScriptedAside:
    """Without threads and processes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def parse(self, raw: bytes, _: Parse) -> Any:
        return json.loads(raw)

    async def encode(self, text: str, add_special_tokens: bool, cut: Cut) -> tuple[int, list[int] | None]:
        return cut.of(self._tokenizer.encode(text, add_special_tokens))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens)

    async def render(
        self, messages: Any, *, add_special_tokens: bool, cut: Cut, most: int, describe_tools: Any, **options: Any
    ) -> tuple[str, int, list[int] | None]:
        options |= options.pop("variables", {})
        options["media_marks"] = options.pop("media", None)
        if describe_tools:
            tools = options.pop("tools")
            text = render_described(
                lambda told: self._tokenizer.apply_chat_template(told, tokenize=False, **options), messages, tools
            )
        else:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert len(text) <= most
        return text, *await self.encode(text, add_special_tokens, cut)


class ScriptedLLM:
    """`script`: what every answer says. `cuts`: after which of its tokens an output is due; None: after each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.offload = ScriptedAside(tokenizer)
        self.inputs = InputProcessor(
            tokenizer, vocab_size=len(tokenizer), max_model_len=1 << 20, max_logprobs=20,
            eos_ids=[tokenizer.eos_token_id], seed=0, offload=self.offload,
        )  # fmt: skip
        self.prompts = self.inputs.prompts
        self.default_sampling: dict[str, Any] = {}
        self.adapters = AdapterNames(enabled=False)
        facts = SimpleNamespace(
            eos_ids=(), parameters=1, architecture="Scripted", files=ModelFiles("scripted", Path("scripted"), "gguf")
        )
        self.config = SimpleNamespace(
            served_names=("scripted",), policy="fcfs", max_logprobs=20, facts=facts, args=EngineArgs(model="scripted"),
            device="cpu", dtype="float32", cache_dtype="float32", device_facts=DeviceFacts("cpu"), keep_quantized=False,
            ranks=1, stages=1, features={}, page_size=16, default_sampling={}, speculation=None,
        )  # fmt: skip
        self.media = MediaReader(self.config, tokenizer)  # type: ignore[arg-type]
        self.script = ""
        self.cuts: Iterable[int] | None = None
        self.finish = "stop"
        self.seen: list[tuple[str, SamplingParams]] = []  # prompts and parameters
        self.pause = 0.0
        self.scored = False  # tokens have logprobs, where they are asked for
        self.ended = 0
        self.steps = 0  # of all answers
        self._stopped: set[tuple[str, int]] = set()  # choices that the server ended

    @property
    def max_model_len(self) -> int:
        return self.prompts.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.seen.append((prompt.text, params))
        prepared = self.inputs.prepare(request_id, prompt, params.__class__(**self._plain(params)), arrival=0.0)
        outputs = OutputProcessor(self.tokenizer)
        answer = outputs.add(prepared)
        try:
            for deltas in self._deltas([request.id for request in prepared.requests], prepared.params.logprobs):
                self.steps += 1
                stopped = {prepared.requests[index].id for name, index in self._stopped if name == request_id}
                outputs.absorb(TokenDelta(one.request_id, [], "stop") if one.request_id in stopped else one for one in deltas)
                if answer.due:
                    yield answer.emit()
                if request_id not in outputs:
                    break
                await asyncio.sleep(self.pause)
        finally:
            self.ended += 1

    def stop_choice(self, request_id: str, index: int) -> None:
        self._stopped.add((request_id, index))

    def _plain(self, params: SamplingParams) -> dict[str, Any]:
        """Without the grammar: a script needs none, and compiling it is not the matter here."""
        kept = ("n", "temperature", "stop", "max_tokens", "skip_special_tokens", "output_kind", "seed")
        return {name: getattr(params, name) for name in kept} | {"logprobs": params.logprobs if self.scored else None}

    def _deltas(self, ids: list[str], top: int | None) -> Iterable[list[TokenDelta]]:
        tokens = self.tokenizer.encode(self.script, add_special_tokens=False)
        cuts = [cut for cut in (range(1, len(tokens)) if self.cuts is None else sorted({*self.cuts})) if 0 < cut < len(tokens)]
        last = [self.tokenizer.eos_token_id] if self.finish == "stop" else []
        for begin, end in pairwise([0, *cuts, len(tokens)]):
            part, finish = (tokens[begin:], self.finish) if end == len(tokens) else (tokens[begin:end], None)
            part += last if finish else []
            yield [TokenDelta(name, part, finish, logprobs=_scores(part, top)) for name in ids]


def _scores(tokens: Sequence[int], top: int | None) -> tuple[TopLogprobs, ...]:
    """Every token has the logprob -id; the alternatives are the ids from 0 on."""
    if top is None:
        return ()
    rows = [[token, *range(top)] for token in tokens]
    rank = np.array([1], np.int32)
    return tuple(TopLogprobs(np.array([row], np.int32), -np.array([row], np.float32), rank) for row in rows)


class Scripted:
    """The HTTP app over a scripted model."""

    def __init__(self, tokenizer: Tokenizer, metrics: bool = False, **settings: Any) -> None:
        self.llm = ScriptedLLM(tokenizer)
        counts = Metrics("quire", "scripted", 100, {}) if metrics else None
        self.app = build_app(self.llm, ServerArgs(**settings), metrics=counts)  # type: ignore[arg-type]

    def say(self, script: str, cuts: Iterable[int] | None = None, finish: str = "stop") -> "Scripted":
        self.llm.script, self.llm.cuts, self.llm.finish = script, cuts, finish
        return self

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://scripted", timeout=PATIENCE) as client:
                return await client.request(method, path, json=body, **options)

        return asyncio.run(go())

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.call("POST", path, body, **options)
