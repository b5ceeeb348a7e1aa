"""Ranks on GPUs: what is run where there are enough of them, and what is refused by name."""

from dataclasses import replace

import pytest
from test_resolve_config import model  # noqa: F401

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.resolve import resolve
from quire.device.registry import open_device
from quire.engine.agreement import refuse_other_values, resolved_values
from quire.engine.start_local import warn_uneven
from quire.types.errors import ConfigError


def config_of(path, gpus: int, **values) -> Config:
    args = EngineArgs.from_kwargs(model=str(path), load_format="dummy", **values)
    return resolve(args, lambda: "cuda", lambda name: replace(open_device(name).facts(memory=2**37), count=gpus))


@pytest.mark.parametrize(
    ("gpus", "values"),
    [
        (2, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (0, {"pipeline_parallel_size": 4}),  # nobody looked: `quire plan` supposes that they are there
        (2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}),
        (2, {"tensor_parallel_size": 4, "nnodes": 2}),
        (1, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}),  # each rank gets its GPU from Ray
        (1, {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"}),  # ... or from torchrun
        (2, {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    ],
)
def test_enough_gpus(model, gpus, values):  # noqa: F811
    config = config_of(model, gpus, **values)
    assert config.depth == (config.stages - 1 if config.stages > 1 else 1)


@pytest.mark.parametrize(
    ("gpus", "values", "message"),
    [
        (
            1,
            {"tensor_parallel_size": 2},
            "needs 2 GPUs on this machine, one per rank, and 1 are visible",
        ),
        (3, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, r"needs 4 GPUs .* QUIRE_CUDA_RANKS=1 lets ranks share"),
        (1, {"tensor_parallel_size": 4, "nnodes": 2}, r"needs 2 GPUs on this machine, one per rank, and 1 are visible"),
    ],
)
def test_what_is_refused(model, gpus, values, message, monkeypatch):  # noqa: F811
    with pytest.raises(ConfigError, match=message):
        config_of(model, gpus, **values)
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    if "share" in message or "visible" in message:
        assert config_of(model, gpus, **values).world > gpus
    else:
        with pytest.raises(ConfigError, match=message):
            config_of(model, gpus, **values)


def test_the_rank_whose_gpu_limits_the_cache_of_all_is_named(model, caplog):  # noqa: F811
    config = config_of(model, 2, tensor_parallel_size=2)
    warn_uneven(config, [40 << 30, 38 << 30])
    warn_uneven(config_of(model, 2, pipeline_parallel_size=2), [40 << 30, 20 << 30])
    assert not caplog.records
    warn_uneven(config, [40 << 30, 20 << 30])
    assert "rank 1 has 20.0 GiB for the KV cache and rank 0 has 40.0 GiB" in caplog.text
    warn_uneven(config_of(model, 2, tensor_parallel_size=4, nnodes=2), [40 << 30, 40 << 30, 20 << 30, 40 << 30])
    assert "rank 2 on node 1 has 20.0 GiB for the KV cache and rank 0 on node 0 has 40.0 GiB" in caplog.text


def test_a_rank_with_another_gpu_is_refused(model):  # noqa: F811
    def on(gpu, **sizes):
        config = config_of(model, 2, **sizes)
        return replace(config, device_facts=replace(config.device_facts, name=gpu))

    first, other = (on(gpu, tensor_parallel_size=2) for gpu in ("NVIDIA H200", "NVIDIA L4"))
    refuse_other_values(first, resolved_values(first))
    with pytest.raises(ConfigError, match="its GPU is 'NVIDIA L4', rank 0's is 'NVIDIA H200'"):
        refuse_other_values(other, resolved_values(first))
    stages = {"pipeline_parallel_size": 2}
    refuse_other_values(on("NVIDIA L4", **stages), resolved_values(on("NVIDIA H200", **stages)))


def test_ranks_that_draft_wait_for_each_step(model):  # noqa: F811
    drafts = {"model": str(model), "num_speculative_tokens": 2}
    config = config_of(model, 2, tensor_parallel_size=2, speculative_config=drafts)
    assert config.drafts_on_device and config.depth == 0
    with pytest.raises(ConfigError, match="async_scheduling plans steps before the last one's states are read"):
        config_of(model, 2, tensor_parallel_size=2, speculative_config=drafts, async_scheduling=True)
