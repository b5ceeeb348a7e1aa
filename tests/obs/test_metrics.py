from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from quire.obs.instruments import Board
from quire.obs.metrics import Metrics, one_two_five
from quire.types.outputs import RequestMetrics
from quire.types.sampling import SamplingParams
from quire.types.stats import DeviceCounts, Finished, OutputNews, Stats, TierCounts

# name -> type, labels beside model_name and engine, and how many buckets a histogram has
EXPECTED = {
    "num_requests_running": ("gauge", (), 0),
    "num_requests_waiting": ("gauge", (), 0),
    "num_requests_waiting_by_reason": ("gauge", ("reason",), 0),
    "kv_cache_usage_perc": ("gauge", (), 0),
    "cache_config_info": ("gauge", ("block_size", "num_gpu_blocks"), 0),
    "prefix_cache_queries": ("counter", (), 0),
    "prefix_cache_hits": ("counter", (), 0),
    "external_prefix_cache_queries": ("counter", (), 0),
    "external_prefix_cache_hits": ("counter", (), 0),
    "kv_offload_store_bytes": ("counter", (), 0),
    "kv_offload_load_bytes": ("counter", (), 0),
    "kv_offload_stores_skipped": ("counter", (), 0),
    "kv_offload_tiering_write_bytes": ("counter", (), 0),
    "kv_offload_tiering_read_bytes": ("counter", (), 0),
    "kv_offload_load_failures": ("counter", (), 0),
    "kv_offload_cpu_cache_usage_perc": ("gauge", (), 0),
    "num_preemptions": ("counter", (), 0),
    "kernel_compilations": ("counter", (), 0),
    "kernel_loads": ("counter", (), 0),
    "graph_captures": ("counter", (), 0),
    "graph_replays": ("counter", (), 0),
    "graph_misses": ("counter", (), 0),
    "grammar_losses": ("counter", (), 0),
    "spec_decode_num_drafts": ("counter", (), 0),
    "spec_decode_num_draft_tokens": ("counter", (), 0),
    "spec_decode_num_accepted_tokens": ("counter", (), 0),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", ("position",), 0),
    "lora_reads": ("counter", (), 0),
    "lora_loads": ("counter", (), 0),
    "estimated_flops_per_gpu": ("counter", (), 0),
    "estimated_read_bytes_per_gpu": ("counter", (), 0),
    "estimated_write_bytes_per_gpu": ("counter", (), 0),
    "gpu_utilization": ("gauge", ("gpu", "gpu_name"), 0),
    "gpu_memory_used_bytes": ("gauge", ("gpu", "gpu_name"), 0),
    "gpu_memory_total_bytes": ("gauge", ("gpu", "gpu_name"), 0),
    "lora_requests": ("counter", ("lora_name",), 0),
    "lora_prompt_tokens": ("counter", ("lora_name",), 0),
    "lora_generation_tokens": ("counter", ("lora_name",), 0),
    "lora_requests_info": ("gauge", ("max_lora", "waiting_lora_adapters", "running_lora_adapters"), 0),
    "tool_calls": ("counter", ("outcome",), 0),
    "mm_cache_queries": ("counter", (), 0),
    "mm_cache_hits": ("counter", (), 0),
    "mm_processing_seconds": ("histogram", (), 22),
    "mm_encoder_cache_queries": ("counter", (), 0),
    "mm_encoder_cache_hits": ("counter", (), 0),
    "mm_encoder_embeddings": ("counter", (), 0),
    "prompt_tokens": ("counter", (), 0),
    "generation_tokens": ("counter", (), 0),
    "prompt_tokens_by_source": ("counter", ("source",), 0),
    "prompt_tokens_cached": ("counter", (), 0),
    "request_success": ("counter", ("finished_reason",), 0),
    "request_prompt_tokens": ("histogram", (), 7),
    "request_generation_tokens": ("histogram", (), 7),
    "request_max_num_generation_tokens": ("histogram", (), 7),
    "request_params_n": ("histogram", (), 5),
    "request_params_max_tokens": ("histogram", (), 7),
    "request_prefill_kv_computed_tokens": ("histogram", (), 7),
    "iteration_tokens_total": ("histogram", (), 13),
    "time_to_first_token_seconds": ("histogram", (), 22),
    "inter_token_latency_seconds": ("histogram", (), 19),
    "request_time_per_output_token_seconds": ("histogram", (), 19),
    "e2e_request_latency_seconds": ("histogram", (), 21),
    "request_queue_time_seconds": ("histogram", (), 21),
    "request_inference_time_seconds": ("histogram", (), 21),
    "request_prefill_time_seconds": ("histogram", (), 21),
    "request_decode_time_seconds": ("histogram", (), 21),
    "engine_restarts": ("counter", (), 0),
    "requests_replayed": ("counter", (), 0),
    "engine_heartbeat_age_seconds": ("gauge", (), 0),
}


@dataclass
class Engine:
    stats: Stats | None = None
    restarts: int = 0
    replayed: int = 0
    heartbeat_age: float = 0.25


def make(prefix: str = "quire") -> Metrics:
    return Metrics(prefix, "the-model", 100, {"block_size": 16, "num_gpu_blocks": 64})


def values(metrics: Metrics, engine: Engine | None = None) -> dict[str, float]:
    """Samples by name and, if it has any, the value of its own label."""
    text = metrics.render(engine or Engine())[0].decode()
    out = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            out[" ".join([sample.name.partition(":")[2] or sample.name, *own])] = sample.value
    return out


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_names_types_labels_and_buckets(prefix: str) -> None:
    text = make(prefix).render(Engine(Stats(1, 2, 10, 5, 0, 0, 0)))[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name for name in families if ":" in name} == {f"{prefix}:{name}" for name in EXPECTED}
    for name, (kind, labels, buckets) in EXPECTED.items():
        family = families[f"{prefix}:{name}"]
        assert family.type == kind, name
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == "the-model"
            assert sample.labels["engine"] == "0"
            assert set(sample.labels) - {"model_name", "engine", "le"} == set(labels), name
        if kind == "counter":
            assert all(sample.name == f"{prefix}:{name}_total" for sample in family.samples)
        if kind == "histogram":
            assert len([sample for sample in family.samples if sample.name.endswith("_bucket")]) == buckets + 1, name
    assert "process_resident_memory_bytes" in families
    assert "python_info" in families


def test_the_other_format() -> None:
    content, kind = make().render(Engine(), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(content.decode())}
    assert [sample.name for sample in families["quire:num_requests_running"].samples] == ["quire:num_requests_running"]


def test_names_are_the_same_in_every_format() -> None:
    """Prometheus 2 accepts OpenMetrics first, and says nothing of escaping."""
    prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5"
    for accept in ("", "text/plain", "application/openmetrics-text", prometheus, f"{prometheus};escaping=allow-utf-8"):
        content, _ = make().render(Engine(), accept)
        assert b"\nquire:num_requests_running{" in content and b"quire_num" not in content


def test_pages_in_host_memory() -> None:
    metrics = make()
    metrics.on_step(Stats(1, 0, 10, 4, 0, 0, 0, tier=TierCounts(8, 2, 5, 1, 100, 60, 4, 2, 1000, 9, 7, 6)), 7, 0.0)
    seen = values(metrics, Engine(Stats(1, 0, 10, 4, 0, 0, 0, tier=TierCounts(8, 2))))
    assert (seen["external_prefix_cache_queries_total"], seen["external_prefix_cache_hits_total"]) == (100, 60)
    assert (seen["kv_offload_store_bytes_total"], seen["kv_offload_load_bytes_total"]) == (5000, 4000)
    assert (seen["kv_offload_stores_skipped_total"], seen["kv_offload_load_failures_total"]) == (1, 2)
    assert (seen["kv_offload_tiering_write_bytes_total"], seen["kv_offload_tiering_read_bytes_total"]) == (7000, 6000)
    assert seen["kv_offload_cpu_cache_usage_perc"] == 0.25


def test_nothing_is_global() -> None:
    before = {family.name for family in REGISTRY.collect()}
    first, second = make(), make()
    first.on_outputs(OutputNews(0.0, tokens=5))
    assert values(second)["generation_tokens_total"] == 0
    assert {family.name for family in REGISTRY.collect()} == before


def test_the_engines_numbers() -> None:
    metrics = make()
    metrics.on_step(Stats(1, 0, 10, 4, queries=10, hits=4, preemptions=1), 7, 0.0)
    metrics.on_step(Stats(1, 0, 10, 4, queries=30, hits=4, preemptions=1), 1, 0.0)
    metrics.on_step(Stats(1, 0, 10, 4, queries=5, hits=5, preemptions=0), 3, 0.0)  # the engine was restarted
    seen = values(metrics, Engine(Stats(3, 2, 10, 4, 0, 0, 0), restarts=1, replayed=4))
    assert (seen["prefix_cache_queries_total"], seen["prefix_cache_hits_total"], seen["num_preemptions_total"]) == (35, 9, 1)
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (3, 2)
    assert (seen["num_requests_waiting_by_reason capacity"], seen["num_requests_waiting_by_reason deferred"]) == (2, 0)
    assert seen["kv_cache_usage_perc"] == pytest.approx(0.6)
    assert (seen["engine_restarts_total"], seen["requests_replayed_total"]) == (1, 4)
    assert seen["engine_heartbeat_age_seconds"] == 0.25


def test_tokens_of_a_step_are_counted_as_vllm_does() -> None:
    """A prompt counts whole, cached or not, with its first token; all prompts and all generated tokens are the sum."""
    metrics = make()
    metrics.on_outputs(OutputNews(0.0, tokens=2, prompts=[(5, 4), (7, 0)]))
    metrics.on_outputs(OutputNews(0.0, tokens=1))
    metrics.on_outputs(OutputNews(0.0))  # a request was dropped
    seen = values(metrics)
    assert (seen["iteration_tokens_total_count"], seen["iteration_tokens_total_sum"]) == (2, 15)
    assert (seen["iteration_tokens_total_bucket 1.0"], seen["iteration_tokens_total_bucket 16.0"]) == (1, 2)


def test_the_devices_counters() -> None:
    metrics = make()
    metrics.on_step(Stats(1, 0, 10, 4, 0, 0, 0, DeviceCounts(compilations=9, loads=3, captures=1, replays=4)), 7, 0.0)
    metrics.on_step(Stats(1, 0, 10, 4, 0, 0, 0, DeviceCounts(compilations=9, loads=4, captures=1, replays=9, misses=2)), 7, 0.0)
    metrics.on_step(Stats(1, 0, 10, 4, 0, 0, 0, DeviceCounts(loads=12, replays=1)), 7, 0.0)  # the engine was restarted
    seen = values(metrics)
    assert (seen["kernel_compilations_total"], seen["kernel_loads_total"]) == (9, 16)
    assert (seen["graph_captures_total"], seen["graph_replays_total"], seen["graph_misses_total"]) == (1, 10, 2)


def test_requests() -> None:
    metrics = make()
    times = RequestMetrics(0.0, queued_ts=10.0, scheduled_ts=10.5, first_token_ts=11.0, last_token_ts=13.0, finished_ts=13.5)
    params = SamplingParams(n=2, max_tokens=50)
    done = Finished("r", 30, 16, params, times, ("stop", "length"), (5, 2), ("a", "b"))
    news = OutputNews(13.5, tokens=2, prompts=[(30, 16)], first_tokens=[1.0], intervals=[0.02, 0.6], finished=[done])
    metrics.on_outputs(news)
    seen = values(metrics)
    assert (seen["prompt_tokens_total"], seen["generation_tokens_total"], seen["prompt_tokens_cached_total"]) == (30, 2, 16)
    assert seen["prompt_tokens_by_source_total local_cache_hit"] == 16
    assert seen["prompt_tokens_by_source_total local_compute"] == 14
    assert (seen["request_success_total stop"], seen["request_success_total length"]) == (1, 1)
    assert seen["request_success_total abort"] == 0
    for name, value in {
        "time_to_first_token_seconds": 1.0, "inter_token_latency_seconds": 0.62, "e2e_request_latency_seconds": 3.5,
        "request_queue_time_seconds": 0.5, "request_prefill_time_seconds": 0.5, "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5, "request_time_per_output_token_seconds": 0.5, "request_prompt_tokens": 30,
        "request_generation_tokens": 7, "request_max_num_generation_tokens": 5, "request_prefill_kv_computed_tokens": 14,
        "request_params_n": 2, "request_params_max_tokens": 50,
    }.items():  # fmt: skip
        assert seen[f"{name}_sum"] == pytest.approx(value), name
    assert seen["inter_token_latency_seconds_bucket 0.025"] == 1
    assert seen["inter_token_latency_seconds_bucket 0.5"] == 1
    assert seen["inter_token_latency_seconds_bucket 0.75"] == 2
    assert seen["inter_token_latency_seconds_bucket +Inf"] == 2


def test_a_request_that_never_ran() -> None:
    metrics = make()
    times = RequestMetrics(0.0, queued_ts=10.0, finished_ts=11.0)
    metrics.on_outputs(OutputNews(11.0, finished=[Finished("r", 3, 0, SamplingParams(), times, ("abort",), (0,), ("",))]))
    seen = values(metrics)
    assert (seen["request_success_total abort"], seen["e2e_request_latency_seconds_sum"]) == (1, 1.0)
    for name in ("request_queue_time_seconds", "request_decode_time_seconds", "request_time_per_output_token_seconds"):
        assert seen[f"{name}_count"] == 0


def test_buckets() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(40) == (1, 2, 5, 10, 20)
    metrics = make()
    metrics.itl.observe_all([0.01, 0.0100001])  # the end of a bucket is inside it
    assert values(metrics)["inter_token_latency_seconds_bucket 0.01"] == 1


def test_engines_are_told_apart_and_added_up():
    info = {"block_size": 16, "num_gpu_blocks": 64}
    metrics = Metrics("vllm", "the-model", 100, info | {"num_gpu_blocks": 128}, [info, info])
    metrics.on_step(Stats(1, 0, 10, 4, queries=10, hits=4, preemptions=1, engine=0), 7, 0.0)
    metrics.on_step(Stats(2, 0, 10, 4, queries=5, hits=1, preemptions=0, engine=1), 7, 0.0)
    metrics.on_step(Stats(1, 0, 10, 4, queries=30, hits=4, preemptions=1, engine=0), 7, 0.0)
    metrics.on_step(Stats(2, 0, 10, 4, queries=2, hits=0, preemptions=0, engine=1), 7, 0.0)  # it was restarted
    metrics.on_outputs(OutputNews(1.0, tokens=3, first_tokens=[0.5], engine=1))
    metrics.tool_calls.add(1, "complete")
    one, two = (SimpleNamespace(stats=Stats(n, 0, 10, 4, 0, 0, 0), restarts=n, replayed=0, heartbeat_age=0.1) for n in (1, 2))
    both = SimpleNamespace(stats=Stats(3, 0, 20, 8, 0, 0, 0), restarts=3, replayed=0, heartbeat_age=0.1, engines=[one, two])
    text = metrics.render(both)[0].decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a metric is one family"
    samples = {(s.name, s.labels.get("engine")): s.value for family in families for s in family.samples if s.value}
    assert [samples["vllm:prefix_cache_queries_total", engine] for engine in "01"] == [30, 7]
    assert [samples["vllm:num_requests_running", engine] for engine in "01"] == [1, 2]
    assert [samples["vllm:engine_restarts_total", engine] for engine in "01"] == [1, 2]
    assert ("vllm:generation_tokens_total", "0") not in samples and samples["vllm:generation_tokens_total", "1"] == 3
    assert samples["vllm:time_to_first_token_seconds_count", "1"] == 1 == samples["vllm:tool_calls_total", None]
    assert metrics.generation_tokens.values[()] == 3 and metrics.preemptions.values[()] == 1


def test_adapters_of_several_engines_and_processes():
    """They are of all engines; of other processes, too, where these have told them."""
    metrics = Metrics("vllm", "the-model", 100, {}, [{}, {}])
    metrics.adapters, metrics.adapter_names = lambda: (4, ["a"], ["b", "d"]), lambda: ()
    one = SimpleNamespace(stats=None, restarts=0, replayed=0, heartbeat_age=0.1)
    both = SimpleNamespace(**vars(one), engines=[one, one])

    def told(text: bytes) -> list[tuple[str, str, str]]:
        families = text_string_to_metric_families(text.decode())
        samples = next(family.samples for family in families if family.name == "vllm:lora_requests_info")
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        assert all("engine" not in sample.labels for sample in samples)
        return [tuple(sample.labels[name] for name in names) for sample in samples]

    assert told(metrics.render(both)[0]) == [("4", "a", "b,d")]
    others = metrics.render_total(both, Board("http_", {}), [], adapters=(("e", "a"), ("c",)))
    assert told(others[0]) == [("4", "a,e", "b,c,d")]
    assert told(metrics.render(both)[0]) == [("4", "a", "b,d")], "only as long as they have them"
