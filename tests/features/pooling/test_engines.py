"""Pooling requests in engine processes: several engines, ranks, LoRA adapters, and a restart in the middle."""

import asyncio

import numpy as np
import pytest
import torch
from test_decoders import PROMPTS, made, normal, opened, states

from quantized_checkpoints import write
from quire import LLM, AsyncLLM, EngineArgs, LoRARequest, PoolingParams, SamplingParams
from quire.types.errors import NotSupported


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("embedder")
    model = made(directory)
    return directory, [normal(states(model, ids)[-1]).numpy() for ids in PROMPTS]


ARGS = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 4, "num_gpu_blocks_override": 64}


def check(outputs, right):
    for output, vector in zip(outputs, right, strict=True):
        np.testing.assert_allclose(output.outputs.data, vector, atol=1e-5)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}])
def test_ranks_and_engines(embedder, sizes, quick):
    directory, right = embedder
    with opened(directory, max_num_batched_tokens=16, **sizes) as llm:
        check(llm.encode(PROMPTS, use_tqdm=False), right)


def test_a_restart_changes_nothing(embedder, quick):
    directory, right = embedder

    async def scene():
        llm = AsyncLLM.from_engine_args(EngineArgs(str(directory), **ARGS, max_num_batched_tokens=16))
        try:
            await llm.wait_ready()
            assert llm.supported_tasks == ("embed", "token_embed", "score") == await llm.get_supported_tasks()

            async def ask(name, params):
                [output] = [one async for one in llm.encode(PROMPTS[name], params, str(name))]
                return output

            before = await asyncio.gather(*(ask(i, PoolingParams()) for i in range(len(PROMPTS))))
            check(before, right)
            asked = [asyncio.ensure_future(ask(i, PoolingParams())) for i in range(len(PROMPTS))]
            await asyncio.sleep(0)
            import os
            import signal

            os.kill(llm.engine_pid, signal.SIGKILL)
            after = await asyncio.gather(*asked)
            for one, other in zip(before, after, strict=True):
                assert (one.outputs.data == other.outputs.data).all()
            with pytest.raises(NotSupported, match="generates no text"):
                async for _ in llm.generate(PROMPTS[0], SamplingParams(), "text"):
                    pass
        finally:
            llm.shutdown()

    asyncio.run(scene())


def test_adapters_change_vectors(tmp_path):
    from adapters import write_adapter

    model = made(tmp_path)
    random = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 64, generator=random), torch.randn(64, 2, generator=random)
    name = "layers.1.self_attn.o_proj"
    tensors = {f"base_model.model.model.{name}.lora_{half}.weight": value for half, value in (("A", down), ("B", up))}
    adapter = LoRARequest("a", 1, str(write_adapter(tmp_path / "adapter", tensors, lora_alpha=2)))
    with opened(tmp_path, enable_lora=True, max_lora_rank=8, max_num_batched_tokens=16) as llm:
        each = [adapter, None, adapter]
        plain = [normal(states(model, ids)[-1]).numpy() for ids in PROMPTS]
        model.get_submodule(name).weight.data += up @ down
        adapted = [normal(states(model, ids)[-1]).numpy() for ids in PROMPTS]
        found = llm.encode([PROMPTS[3], PROMPTS[3], PROMPTS[4]], lora_request=each, use_tqdm=False)
        check(found, [adapted[3], plain[3], adapted[4]])
        assert isinstance(llm, LLM) and np.abs(adapted[3] - plain[3]).max() > 0.01


@pytest.mark.parametrize("scheme", ["awq", "fp8-block", "gptq", "bnb-nf4"])
def test_quantized_weights(tmp_path, scheme):
    write(scheme, tmp_path)
    found = []
    for kind in ("quantized", "floats"):
        with opened(tmp_path / kind, runner="pooling", dtype="auto", skip_tokenizer_init=True) as llm:
            found.append([one.outputs.data for one in llm.encode(PROMPTS, use_tqdm=False)])
    assert min(float(one @ other) for one, other in zip(*found, strict=True)) > 0.999


@pytest.mark.parametrize("flags", [["--tensor-parallel-size=2"], ["--pipeline-parallel-size=2"], ["--enable-lora"]])
@pytest.mark.parametrize("kind", ["Qwen2Model", "Qwen2ForSequenceClassification"])
def test_a_plan_reads_the_head_of_a_pooling_model(tmp_path, kind, flags, capsys):
    from quire.cli.main import main

    made(tmp_path, kind, "Qwen2Config", num_labels=3)
    assert main(["plan", str(tmp_path), "--device=cpu", *flags]) == 0
    assert "Cache" in capsys.readouterr().out
