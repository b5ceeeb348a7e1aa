"""`deterministic` with ranks, drafters and several features at once, and through the server: the bits of each request alone."""

import concurrent.futures
import os
import random
import signal

import pytest
from test_deterministic import CPU, GPU, OPTIONS, REQUESTS, answers, differing, make
from test_draft_heads import eagle, model, trained, with_layer  # noqa: F401
from test_speculation import DRAFTERS

from adapters import halves, write_adapter
from forked import nursery
from patience import wait_for
from quire import LLM, SamplingParams
from quire.engine.executor import workers
from quire.ops.order import order_is_fixed
from quire.runner import step
from quire.runner.batch import build_batch
from quire.types.adapter import LoRARequest
from quire.types.structured import StructuredOutputsParams
from serving import Running, events_of

ON_ONE_GPU = {"kv_cache_memory_bytes": 1 << 28}
STREAMS, TOKENS = 8, 80


@CPU
def test_engines_of_one_process_have_their_own_order(tmp_path, monkeypatch):
    directory, found = make(tmp_path, "llama"), []
    monkeypatch.setattr(step, "build_batch", lambda *rows, **more: found.append(order_is_fixed()) or build_batch(*rows, **more))
    engines = {fixed: LLM(directory, max_model_len=256, deterministic=fixed).llm_engine for fixed in (True, False)}
    for engine in engines.values():
        for prompt in range(3):
            params = SamplingParams(max_tokens=5 + prompt, ignore_eos=True)
            engine.add_request(str(prompt), {"prompt_token_ids": [7 + prompt, 8, 9]}, params)
    orders = {True: [], False: []}
    while any(engine.has_unfinished_requests() for engine in engines.values()):
        for fixed, engine in engines.items():
            found.clear()
            engine.step()
            orders[fixed] += found
    assert all(set(values) == {fixed} for fixed, values in orders.items())


# ---- several features at once -----------------------------------------------------------------------------------------------


def mixed_requests():
    """Return prompts and parameters: several answers, prompt logprobs, grammars, penalties, minimum lengths."""
    rng = random.Random(3)
    shared = [rng.randrange(2, 320) for _ in range(70)]
    prompts = [(shared if i % 2 else []) + [rng.randrange(2, 320) for _ in range(1 + 13 * i % 90)] for i in range(12)]
    options = [
        {"n": 3, "temperature": 0.8},
        {"prompt_logprobs": 2, "temperature": 0},
        {"min_tokens": 5, "ignore_eos": False},
        {"structured_outputs": StructuredOutputsParams(regex="[a-c]{4}(the|a)*")},
        {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"logit_bias": {5: 3.0}, "min_p": 0.05, "bad_words": ["the"]},
    ]
    common = {"temperature": 0.9, "max_tokens": 8, "logprobs": 2, "ignore_eos": True}
    return prompts, [SamplingParams(**common | options[i % 6] | {"seed": i}) for i in range(12)]


def found_values(output):
    """Return all tokens and logprobs of a request."""

    def values(steps):
        return [sorted((token, value.logprob) for token, value in (step or {}).items()) for step in steps or ()]

    return values(output.prompt_logprobs), [(list(one.token_ids), values(one.logprobs)) for one in output.outputs]


def ask(llm, chosen, adapters=(None, None)):
    prompts, params = mixed_requests()
    adapted = [adapters[i % 3 == 0] for i in chosen]
    outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in chosen], [params[i] for i in chosen],
                           lora_request=adapted if any(adapted) else None, use_tqdm=False)  # fmt: skip
    return {i: found_values(output) for i, output in zip(chosen, outputs, strict=True)}


@CPU
def test_features_together_and_an_engine_that_is_not_deterministic(tmp_path):
    directory, name = make(tmp_path / "model", "llama"), "base_model.model.model.layers.1.mlp.down_proj"
    adapter = write_adapter(tmp_path / "adapter", halves(name, 256, 512, 8), r=8, target_modules=["down_proj"])
    adapters = [None, LoRARequest("a", 1, adapter)]
    options = {"max_model_len": 512, "enable_lora": True, "max_lora_rank": 8}
    usual = LLM(directory, **options)
    ask(usual, range(12), adapters)
    alone = LLM(directory, deterministic=True, enable_prefix_caching=False, **options)
    expected = {i: ask(alone, [i], adapters)[i] for i in range(12)}
    ask(usual, range(12), adapters)
    for more in ({}, {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 48}):
        llm = LLM(directory, deterministic=True, **options | more)
        for chosen in (range(12), range(11, -1, -1)):
            assert ask(llm, chosen, adapters) == expected, more


# ---- ranks ------------------------------------------------------------------------------------------------------------------


def check_ranks(directory, sizes, **options):
    """Compare each request alone on an empty cache with batches, chunks and prefix hits, with the same ranks."""
    llm = LLM(directory, enable_prefix_caching=False, **OPTIONS | options | sizes)
    expected = answers(llm, 1)
    llm.llm_engine.shutdown()
    for more in ({}, {"max_num_batched_tokens": 96}):
        llm = LLM(directory, **OPTIONS | options | sizes | more)
        for together in (5, REQUESTS):
            assert not differing(answers(llm, together), expected), (sizes, more, together)
        llm.llm_engine.shutdown()


@pytest.fixture(scope="module")
def forked_ranks(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


@CPU
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("argument", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_on_a_cpu(tmp_path, argument):
    check_ranks(make(tmp_path, "llama"), {argument: 2})


@GPU
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek_v3", {"tensor_parallel_size": 2}),
        ("bamba", {"tensor_parallel_size": 2}),
    ],
)
def test_ranks_on_a_gpu(tmp_path, monkeypatch, kind, sizes):
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    check_ranks(make(tmp_path, kind), sizes, max_num_seqs=32, **ON_ONE_GPU)


# ---- drafters ---------------------------------------------------------------------------------------------------------------


def check_drafts(directory, drafter, **options):
    """Compare each request alone without drafts with batches with drafts."""
    options = {"deterministic": True, "dtype": "bfloat16", "max_model_len": 256} | ON_ONE_GPU | options
    llm = LLM(str(directory), enable_prefix_caching=False, **options)
    expected = {i: ask(llm, [i])[i] for i in range(12)}
    llm = LLM(str(directory), speculative_config=drafter | {"adaptive": False}, **options)
    for chosen in (range(12), [3], range(11, -1, -1)):
        assert ask(llm, chosen) == {i: expected[i] for i in chosen}, chosen
    assert llm.llm_engine.core.stats.drafts.tokens > 20


@GPU
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["suffix", "custom", "itself", "eagle", "eagle3", "medusa"])
def test_drafters_on_a_gpu(name, eager, model, trained, eagle):  # noqa: F811
    path = {"itself": model, "eagle": eagle[0]}.get(name) or trained.get(name)
    drafter = DRAFTERS.get(name) or {"num_speculative_tokens": 3} | ({"method": "eagle"} if name == "eagle" else {})
    check_drafts(model, drafter | ({} if path is None else {"model": str(path)}), enforce_eager=eager)


@GPU
def test_mtp_layers_on_a_gpu(with_layer):  # noqa: F811
    check_drafts(with_layer[0], {"method": "mtp", "num_speculative_tokens": 3})


# ---- the server -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    directory = make(tmp_path_factory.mktemp("deterministic"), "llama")
    server = Running(directory, deterministic=True, max_model_len=1024, block_size=16, max_num_seqs=5)
    yield server
    server.close()


def bodies():
    rng = random.Random(5)
    common = {"model": "tiny", "max_tokens": TOKENS, "logprobs": 2, "ignore_eos": True, "stream": True}
    prompts = [[rng.randrange(2, 320) for _ in range(rng.choice([1, 15, 130]))] for _ in range(STREAMS)]
    return [common | {"prompt": prompt, "temperature": 0.9 * (i % 2), "seed": i} for i, prompt in enumerate(prompts)]


def follow(running, body, begun=lambda: None):
    """Return the tokens, logprobs and fingerprints of a stream."""
    tokens, logprobs, fingerprints = [], [], set()
    with running.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [event] = events_of(line)
                [choice] = event["choices"]
                given = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                tokens, logprobs = tokens + given["tokens"], logprobs + given["token_logprobs"]
                fingerprints.add(event.get("system_fingerprint"))  # the last event has it
                begun()
    assert len(tokens) == TOKENS
    return tokens, logprobs, fingerprints


@CPU
def test_streams_at_once_and_after_the_engine_was_killed(running):
    asked = bodies()
    alone = [follow(running, body) for body in asked]
    begun = [0] * STREAMS

    def note(i):
        begun[i] += 1

    engine = running.llm.engines[0]
    lost = engine.pid
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(follow, running, body, lambda i=i: note(i)) for i, body in enumerate(asked)]
        wait_for(lambda: sum(count > 3 for count in begun) >= 4)
        os.kill(lost, signal.SIGKILL)
        found = [stream.result() for stream in streams]
    assert engine.pid != lost and running.llm.replayed >= 1
    assert found == alone
