"""AsyncLLM: vLLM's methods besides generate and abort, built or refused by name."""

import asyncio

import pytest
from async_support import collect, run, until
from tiny import TEXT

from patience import PATIENCE
from quire import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, SamplingParams
from quire.types.errors import EngineDead, InvalidParameter, NotSupported

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("quick")


def test_what_programs_ask_of_an_engine(crew):
    llm = crew.llm

    async def scene():
        assert (llm.is_running, llm.is_stopped, llm.errored) == (True, False, False)
        assert llm.model_config == llm.vllm_config.model_config == await llm.get_model_config()
        assert (llm.model_config.max_model_len, llm.vllm_config.cache_config.block_size) == (llm.max_model_len, 4)
        assert llm.vllm_config.scheduler_config.max_num_seqs == 64 and (await llm.get_vllm_config()) == llm.vllm_config
        assert await llm.get_supported_tasks() == ("generate",) and not await llm.is_tracing_enabled()
        assert not await llm.is_sleeping() and not await llm.is_paused()
        assert await llm.reset_mm_cache() is None and await llm.reset_encoder_cache() is None
        with pytest.raises(NotSupported, match="reset_connector=True is not supported"):
            await llm.reset_prefix_cache(reset_connector=True)
        cut = [o async for o in llm.generate(TEXT[0], GREEDY, "cut", tokenization_kwargs={"truncate_prompt_tokens": 2})]
        assert cut[-1].prompt_token_ids == llm.tokenizer.encode(TEXT[0])[-2:]

    crew(scene())


def test_the_cache_is_reset_under_a_running_request(crew):
    llm, params = crew.llm, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    async def scene():
        alone = (await collect(llm, TEXT[0], params, "alone"))[-1].outputs[0].token_ids
        outputs = []
        async for output in llm.generate(TEXT[0], params, "reset"):
            assert outputs or await llm.reset_prefix_cache(reset_running_requests=True)
            outputs.append(output)
        assert outputs[-1].outputs[0].token_ids == alone

    crew(scene())


def test_waiting_until_nothing_is_open(crew, caplog):
    async def scene():
        await crew.llm.wait_for_requests_to_drain(0)
        endless = asyncio.create_task(collect(crew.llm, [1, 2], SamplingParams(max_tokens=100, ignore_eos=True), "long"))
        await until(lambda: crew.llm.num_open)
        with pytest.raises(TimeoutError, match="1 requests are still open after 0 s"):
            await crew.llm.wait_for_requests_to_drain(0)
        with caplog.at_level("INFO"):
            await until(lambda: crew.llm.stats and crew.llm.stats.running)
            await crew.llm.do_log_stats()
        assert "Running: 1 reqs, Waiting: 0 reqs, KV cache usage: " in caplog.text
        await crew.llm.wait_for_requests_to_drain()
        assert crew.llm.num_open == 0 and (await endless)[-1].finished

    crew(scene())


@pytest.mark.parametrize(
    "name",
    [
        "add_request", "pause_generation", "resume_generation", "sleep", "wake_up",
        "checkpoint_prepare", "checkpoint_restore", "scale_elastic_ep", "handle_fault", "get_status", "update_weights",
        "init_weight_transfer_engine", "start_weight_update", "start_draft_weight_update", "finish_weight_update",
        "update_weight_version", "get_weight_version", "notify_kv_transfer_request_rejected", "from_vllm_config",
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(crew, name):
    with pytest.raises(NotSupported, match=f"AsyncLLM.{name} is not available: ") as caught:
        getattr(crew.llm, name)("x")
    assert caught.value.parameter == name


def test_ranks_are_called_and_arguments_have_vllms_names(tiny_model):
    args = AsyncEngineArgs(str(tiny_model), device="cpu", kv_cache_memory_bytes=4 << 20)
    with pytest.raises(NotSupported) as caught:
        AsyncLLM.from_engine_args(engine_args=args, start_engine_loop=False)
    assert caught.value.parameter == "start_engine_loop"
    llm = AsyncLLMEngine.from_engine_args(engine_args=args, usage_context="API_SERVER")

    async def scene():
        [rank] = await llm.collective_rpc("describe_rank", timeout=PATIENCE)
        assert rank["rank"] == 0 and rank["pid"] == llm.engine_pid
        assert await llm.collective_rpc("check_health") == [None]
        with pytest.raises(InvalidParameter, match="ranks have no method 'close'"):
            await llm.collective_rpc("close")
        with pytest.raises(NotSupported, match="takes no arguments"):
            await llm.collective_rpc("check_health", args=(1,))
        assert await llm.reset_prefix_cache()
        llm.shutdown()
        assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, True)
        assert isinstance(llm.dead_error, EngineDead)

    run(scene(), llm)
