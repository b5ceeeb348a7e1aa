"""Write docs/metrics.md: every metric of `/metrics`.

python scripts/metrics_page.py > docs/metrics.md
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from quire.obs.instruments import Counter, Histogram, Instrument
from quire.obs.metrics import CALL_ENDS, REASONS, HttpMetrics, Metrics

_HEAD = """# Metrics

`GET /metrics` in Prometheus' text format or OpenMetrics, by the `Accept` header. Names, types, labels and buckets are
vLLM's where vLLM has the metric; `--metrics-prefix vllm` names them as dashboards made for it expect. `LLM.get_metrics()`
gives the same as objects (with `disable_log_stats=False`). A histogram is `NAME_bucket`, `NAME_sum` and `NAME_count`. The
page is made from `src/quire/obs/metrics.py`.

With `--api-key` the page needs a key; `--metrics-without-key` opens it.

## Engine and requests

All carry `model_name` and `engine`, the engine's number; of several engines each has its own samples, and only tool calls,
`quire:lora_requests_info` and `quire:gpu_*` are of all together, without a number.

"""
_HTTP = """
`outcome` is {}. `finished_reason` is {}.

## HTTP

`handler` is the route's template, so clients cannot make up labels; `status` is 2xx, 4xx, 5xx.

"""
_PROCESS = """
Prometheus' own collectors add the API process (`process_*`), the interpreter (`python_info`) and its garbage collector
(`python_gc_*`), unless there are several API processes (`--api-server-count`): then all numbers are of all of them together.

`quire:gpu_*` require a CUDA device and `pip install 'quire[nvml]'`. They are read every 5 seconds, on the machine of the API
process. The estimates of `--enable-mfu-metrics` count matrices, attention, keys, values and states, but no activations.

## What to look at

| question | where |
|---|---|
| Does it keep up? | `quire:num_requests_waiting` stays near 0; `quire:request_queue_time_seconds` is small |
| Is there enough cache? | `quire:kv_cache_usage_perc` below 1; `quire:num_preemptions_total` does not grow |
| What do people wait for? | `quire:time_to_first_token_seconds`, `quire:inter_token_latency_seconds` |
| Do prompts repeat? | `quire:prefix_cache_hits_total` / `quire:prefix_cache_queries_total` |
| Is the engine well? | `quire:engine_heartbeat_age_seconds` below 3; `quire:engine_restarts_total` does not grow |
| Is the tool format right? | `quire:tool_calls_total` by `outcome`: `broken` and `text` stay few |
| Do drafts pay? | `quire:spec_decode_num_accepted_tokens_total` per `quire:spec_decode_num_drafts_total` |
| How busy are the GPUs? | `quire:gpu_utilization`; for the MFU the rate of `quire:estimated_flops_per_gpu_total` by the GPU's |
| On a GPU, is it warm? | under steady traffic only `quire:graph_replays_total` grows, not captures, misses or compilations |
"""


def table() -> str:
    engine = Metrics("quire", "model", 1000, {"block_size": 16, "num_gpu_blocks": 1, "enable_prefix_caching": True}).board
    http = HttpMetrics(CollectorRegistry()).board
    middle = _HTTP.format(", ".join(f"`{end}`" for end in CALL_ENDS), ", ".join(f"`{reason}`" for reason in REASONS))
    return _HEAD + _rows(engine.prefix, engine.instruments) + middle + _rows(http.prefix, http.instruments) + _PROCESS


def _rows(prefix: str, instruments: Iterable[Instrument]) -> str:
    lines = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for one in sorted(instruments, key=lambda one: one.name):
        name = prefix + one.name + ("_total" if isinstance(one, Counter) else "")
        labels = ", ".join(f"`{label}`" for label in one.labels)
        kind = type(one).__name__.lower()
        if isinstance(one, Histogram):
            kind += f" to {one.bounds[-1]:g}" if one.name.endswith("_seconds") else ""
        lines.append(f"| `{name}` | {kind} | {labels} | {one.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
