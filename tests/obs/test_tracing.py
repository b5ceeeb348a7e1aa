import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.obs.tracing import Tracing, make_exporter, trace_headers
from quire.types.errors import ConfigError
from quire.types.outputs import RequestMetrics
from quire.types.sampling import SamplingParams
from quire.types.stats import Finished, OutputNews

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TIMES = RequestMetrics(
    0.0, queued_ts=10.0, scheduled_ts=10.5, first_token_ts=11.0, last_token_ts=13.0, finished_ts=13.5, first_token_latency=1.0
)


def spans_of(*requests: Finished):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    tracing.on_outputs(OutputNews(0.0, finished=list(requests)))
    tracing.close(5.0)
    return exporter.get_finished_spans()


def test_a_span_per_request() -> None:
    params = SamplingParams(n=2, max_tokens=50, top_p=0.5, temperature=0.7)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    request = Finished("r", 30, 16, params, TIMES, ("stop", "length"), (5, 2), ("a", "b"), headers)
    before = time.time_ns()
    (span,) = spans_of(request)
    assert span.name == "llm_request"
    assert dict(span.attributes) == {
        "gen_ai.request.id": "r",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.usage.prompt_tokens": 30,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.latency.e2e": 3.5,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
    }
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    assert span.context.trace_state["vendor"] == "1"
    assert span.end_time - span.start_time == pytest.approx(3.5e9)
    assert span.end_time >= before
    assert span.resource.attributes["service.name"] == "quire"


def test_without_a_parent_and_without_a_token() -> None:
    times = RequestMetrics(0.0, queued_ts=10.0, finished_ts=11.0)
    (span,) = spans_of(Finished("r", 3, 0, SamplingParams(max_tokens=None), times, ("abort",), (0,), ("",)))
    assert span.parent is None
    assert span.attributes["gen_ai.latency.e2e"] == 1.0
    assert not {name for name in span.attributes if "model" in name or "queue" in name or "max_tokens" in name}


def test_headers() -> None:
    assert trace_headers({"traceparent": "a", "tracestate": "b", "cookie": "c"}) == {"traceparent": "a", "tracestate": "b"}
    assert trace_headers({"tracestate": "b"}) is None
    assert trace_headers({}) is None


def test_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "grpc" in type(make_exporter("http://127.0.0.1:1")).__module__
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert "http" in type(make_exporter("http://127.0.0.1:1")).__module__
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="smoke"):
        make_exporter("http://127.0.0.1:1")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        make_exporter("http://127.0.0.1:1")


def test_nothing_is_imported_unless_asked_for() -> None:
    code = "import quire.obs.tracing, sys; print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
