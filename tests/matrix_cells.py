"""The columns of the matrix (tests/e2e/test_matrix.py): ways to run a family. Each is an equality."""

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from matrix_case import BUDGET, NEW_TOKENS, PAGE, PENALTY, Case, ids_of
from matrix_columns import COLUMNS
from quire import LLM, AsyncLLM, EngineArgs, PoolingParams, SamplingParams
from quire.cache.layout import make_layout, pages_for
from quire.config.resolve import resolve
from quire.device.registry import describe
from quire.engine.executor import workers
from quire.lora.request import LoRARequest
from quire.sampling_params import StructuredOutputsParams
from quire.types.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
ARGUMENTS = {column.name: column.argument for column in COLUMNS if column.argument}  # which some kinds of models are refused
FAR = {"zamba2": 1.5, "zamba2-one-block": 0.8}  # what rounding rows does to likelihoods, in torch too
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def say(llm: LLM, prompts: Any, params: Any = GREEDY, **more: Any) -> list[list[int]]:
    return tokens(llm.generate(prompts, params, use_tqdm=False, **more))


def alone(case: Case) -> None:
    llm = case.engine()
    assert [say(llm, prompt)[0] for prompt in case.prompts] == case.expected


def together(case: Case, **options: Any) -> None:
    assert say(case.engine(**options), case.prompts) == case.expected


def prefix_hit(case: Case) -> None:
    llm = case.engine()
    first, again = (llm.generate(case.prompts[2], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert tokens([first, again]) == [case.expected[2]] * 2
    assert again.num_cached_tokens == (len(case.prompts[2]) - 1) // PAGE * PAGE


def preemption(case: Case) -> None:
    """Pages for one whole request in every cache group, and for the shortest prompt."""
    longest = max(map(len, case.prompts)) + NEW_TOKENS
    layout = make_layout(case.facts.layers, PAGE, 4, without_pages=bool(case.facts.states))
    pages = pages_for(layout, longest, BUDGET) + -(-min(map(len, case.prompts)) // PAGE)
    llm = case.engine(max_model_len=longest, num_gpu_blocks_override=pages)
    outputs = llm.generate(case.prompts, GREEDY, use_tqdm=False)
    assert tokens(outputs) == case.expected
    if case.facts.layers and not any(layer.window for layer in case.facts.layers):
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


def several(case: Case) -> None:
    params = SamplingParams(n=3, temperature=1.0, top_k=1, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS, ignore_eos=True)
    [output] = case.engine().generate(case.prompts[0], params, use_tqdm=False)
    assert [choice.token_ids for choice in output.outputs] == [case.expected[0]] * 3


def seeded(case: Case) -> None:
    llm = case.engine()
    once = say(llm, case.prompts, SEEDED)
    assert [say(llm, prompt, SEEDED)[0] for prompt in case.prompts] == once


def grammar(case: Case) -> None:
    """Beside a request without one: transformers' likeliest tokens of those that the grammar allows, and then the end."""
    given = case.with_tokenizer()
    allowed = ids_of(given["tokenizer"], "01")
    rules = StructuredOutputsParams(regex="[01]{9}")
    masked = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, structured_outputs=rules)
    prompts = [case.prompts[index] for index in (0, 1, 2)]
    outputs = case.engine(**given).generate(prompts, [masked, GREEDY, masked], use_tqdm=False)
    for index in (0, 2):
        found = outputs[index].outputs[0]
        assert (list(found.token_ids[:9]), found.finish_reason) == (case.greedy_among(prompts[index], allowed, 9), "stop")
        assert len(found.text) == 9
    assert tokens(outputs)[1] == case.expected[1]


def int4(case: Case) -> None:
    """The tokens of the floats that the 4 bits stand for. Kernels that multiply by them as they are round rows to 8 bits: with
    them prompts are about as likely, whole and in chunks (where they are the same: tests/engine/test_batch_invariance.py)."""
    quantized, floats = case.in_four_bits()
    exact = case.engine(floats)
    assert say(case.engine(quantized), case.prompts) == say(exact, case.prompts)
    expected = likelihoods(exact, case.prompts)
    for more in ({}, {"long_prefill_token_threshold": 7}):
        found = likelihoods(case.engine(quantized, dtype="auto", max_num_batched_tokens=64, **more), case.prompts)
        assert sum(abs(one - other) for one, other in zip(expected, found, strict=True)) / len(found) < FAR.get(case.name, 0.4)


def likelihoods(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Log-probabilities of prompts' tokens."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [
        step[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]


def lora(case: Case) -> None:
    """Beside requests without one: the tokens of the checkpoint that has the adapter in its matrices."""
    llm = case.engine(enable_lora=True, max_loras=1, max_lora_rank=4)
    path, merged = case.with_adapter()
    expected = say(case.engine(merged), case.prompts)
    assert expected != case.expected
    adapter = LoRARequest("adapter", 1, path)
    asked = [adapter, None, adapter, None]
    found = say(llm, case.prompts, lora_request=asked)
    assert found == [(expected if asked[i] else case.expected)[i] for i in range(4)]


def two_ranks(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", case.processes.rank)
        llm = case.engine(tensor_parallel_size=2)
        try:
            assert say(llm, case.prompts) == case.expected
        finally:
            llm.llm_engine.shutdown()


def restart(case: Case) -> None:
    """The engine's process is killed when some tokens of every request are there."""
    settings = EngineArgs.from_kwargs(model=str(case.directory), **case.settings())
    llm = AsyncLLM(resolve(settings, lambda: "cpu", describe), case.processes.engine)
    heard: dict[int, int] = {}
    killed: list[int] = []

    async def follow(index: int) -> list[int]:
        found: list[int] = []
        async for output in llm.generate({"prompt_token_ids": case.prompts[index]}, GREEDY, f"{index}"):
            found = list(output.outputs[0].token_ids)
            heard[index] = len(found)
            if not killed and len(heard) == len(case.prompts) and min(heard.values()) >= 2:
                killed.append(llm.engine_pid)
                os.kill(llm.engine_pid, signal.SIGKILL)
        return found

    async def scene() -> list[list[int]]:
        try:
            await llm.wait_ready()
            return await asyncio.gather(*map(follow, range(len(case.prompts))))
        finally:
            llm.shutdown()

    assert asyncio.run(scene()) == case.expected
    assert (llm.restarts, len(killed)) == (1, 1)


def pooling(case: Case) -> None:
    """Vectors of the last token and of all tokens, in steps with other prompts, of the same checkpoint."""
    if case.facts.hf.get("word_embed_proj_dim") not in (None, case.facts.hidden_size):  # some sizes of OPT
        with pytest.raises(ConfigError, match="word_embed_proj_dim"):
            case.engine(runner="pooling")
        return
    states = [case.final_states(prompt) for prompt in case.prompts]
    llm = case.engine(runner="pooling")
    for task, right in (
        ("embed", [functional.normalize(each[-1], dim=0) for each in states]),
        ("token_embed", [functional.normalize(each, dim=-1) for each in states]),
    ):
        found = llm.encode(case.prompts, PoolingParams(task=task), use_tqdm=False)
        for each, vectors in zip(found, right, strict=True):
            torch.testing.assert_close(torch.from_numpy(each.outputs.data), vectors.float(), rtol=0, atol=1e-4)


CELLS: dict[str, Callable[[Case], None]] = {
    "alone": alone,
    "batched": together,
    **{f"chunks of {n}": functools.partial(together, long_prefill_token_threshold=n) for n in (1, 7, 16)},
    "prefix hit": prefix_hit,
    "preemption": preemption,
    "n > 1": several,
    "seeded sampling": seeded,
    "grammar": grammar,
    "int4": int4,
    "LoRA": lora,
    "tp 2": two_ranks,
    "speculation": functools.partial(together, speculative_config=DRAFTS),
    "engine restart": restart,
    "pooling": pooling,
}
