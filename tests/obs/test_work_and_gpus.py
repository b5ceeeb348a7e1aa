"""What the hardware does: estimates of operations and memory traffic, and the GPUs as NVML sees them."""

import logging
import sys
import time
from types import SimpleNamespace

import pytest

from patience import PATIENCE
from quire import LLM, SamplingParams
from quire.obs.gpus import start_sampler
from quire.obs.metrics import Metrics
from tiny_model import make_model

PROMPT, GENERATED = [5] * 21, 6


def estimates(llm):
    return {each.name: each.value for each in llm.get_metrics() if each.name.startswith("vllm:estimated_")}


@pytest.mark.parametrize("args", [{}, {"max_num_batched_tokens": 8}, {"distributed_executor_backend": "fake"}])
def test_estimates_are_those_of_the_model_by_hand(tmp_path_factory, args):
    model = tmp_path_factory.getbasetemp() / "estimated"
    if not model.exists():
        model.mkdir()
        make_model(model)
    params = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
    with LLM(str(model), device="cpu", kv_cache_memory_bytes=1 << 20, max_num_seqs=2, enable_prefix_caching=False,
             enable_mfu_metrics=True, disable_log_stats=False, **args) as llm:  # fmt: skip
        assert {*estimates(llm).values()} == {0}
        llm.generate([PROMPT], params, use_tqdm=False)
        found = estimates(llm)
    tokens = len(PROMPT) + GENERATED - 1
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, MLP
    flops = 2 * (2 * layer * tokens + 32 * 320 * GENERATED) + 2 * 4 * 32 * sum(range(1, tokens + 1))
    assert found["vllm:estimated_flops_per_gpu"] == flops
    assert found["vllm:estimated_write_bytes_per_gpu"] == tokens * 2 * 2 * 16 * 4
    chunks = -(-len(PROMPT) // args.get("max_num_batched_tokens", 64))
    ends = [min(len(PROMPT), 8 * (i + 1)) for i in range(chunks)] if chunks > 1 else [len(PROMPT)]
    ends += range(len(PROMPT) + 1, tokens + 1)
    read = len(ends) * (2 * layer + 32 * 320) * 4 + sum(ends) * 2 * 2 * 16 * 4
    assert found["vllm:estimated_read_bytes_per_gpu"] == read


def test_nothing_is_counted_unasked(tmp_path):
    with LLM(str(make_model(tmp_path)), device="cpu", kv_cache_memory_bytes=1 << 20, disable_log_stats=False) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
        assert {*estimates(llm).values()} == {0}


def nvml_of(cards, fails=False):
    """A module like pynvml. cards: (name, percent, used, total)."""

    def init():
        if fails:
            raise RuntimeError("Driver Not Loaded")

    return SimpleNamespace(
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: int(name.removeprefix("GPU-")),
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: cards[handle][0],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=cards[handle][1]),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=cards[handle][2], total=cards[handle][3]),
    )


def scraped(sampler, several=()):
    metrics = Metrics("quire", "m", 10, {}, several)
    metrics.gpus = lambda: sampler.readings
    idle = SimpleNamespace(stats=None, restarts=0, replayed=0, heartbeat_age=0.0)
    idle.engines = [idle] * len(several)
    text = metrics.render(idle)[0].decode()
    return [line for line in text.splitlines() if line.startswith("quire:gpu_")]


@pytest.mark.parametrize("visible", [None, "1", "GPU-1"])
def test_gpus(monkeypatch, visible):
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of([(b"A", 7, 10, 100), ("B", 50, 20, 200)]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sampler = start_sampler()
    deadline = time.monotonic() + PATIENCE
    while not sampler.readings and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = scraped(sampler)
    assert len(lines) == (6 if visible is None else 3)
    assert 'quire:gpu_utilization{engine="0",gpu="1",gpu_name="B",model_name="m"} 0.5' in lines
    assert any(line.startswith("quire:gpu_memory_used_bytes{") and line.endswith(" 20.0") for line in lines)
    assert len(scraped(sampler, [{}, {}])) == len(lines), "not once for each engine"
    sampler.end()
    sampler.join(PATIENCE)
    assert not sampler.is_alive()


def test_a_machine_without_nvml(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "quire.obs.gpus")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert start_sampler() is None
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of([], fails=True))
    sampler = start_sampler()
    sampler.join(PATIENCE)
    assert not sampler.is_alive() and scraped(sampler) == []
    assert [record.message.partition(":")[0] for record in caplog.records] == ["GPU metrics are off"] * 2
    assert "Driver Not Loaded" in caplog.text
