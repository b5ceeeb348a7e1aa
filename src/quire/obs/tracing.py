"""OpenTelemetry traces: one span per request, beneath the span of its client. Optional: the extra is `otel`."""

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.types.errors import ConfigError
from quire.types.stats import Arrived, Finished, OutputNews, Stats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN = "llm_request"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
CARRIED = ("traceparent", "tracestate")


def trace_headers(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the request's headers that identify its trace."""
    found = {name: value for name in CARRIED if (value := headers.get(name)) is not None}
    return found if "traceparent" in found else None


class Tracing:
    """An observer that makes a span of every request that is over."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "quire")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:
        """Steps have no spans."""

    def on_arrival(self, request: Arrived) -> None:
        """The span is made at the end, with its start set back."""

    def on_outputs(self, news: OutputNews) -> None:
        for request in news.finished:
            self._record(request)

    def _record(self, request: Finished) -> None:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(request.trace_headers) if request.trace_headers else None
        taken = request.metrics.finished_ts - request.metrics.queued_ts
        end = time.time_ns()
        span = self._tracer.start_span(
            SPAN, context=context, kind=SpanKind.SERVER, start_time=end - int(taken * 1e9), attributes=attributes(request)
        )
        span.end(end_time=end)

    def close(self, seconds: float) -> None:
        """Sends what has not been sent, if that is possible in time."""
        sending = threading.Thread(target=self._provider.shutdown, name="quire-traces", daemon=True)
        sending.start()
        sending.join(seconds)


def attributes(request: Finished) -> dict[str, Any]:
    metrics, params = request.metrics, request.params
    found: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(request.generated),
        "gen_ai.latency.e2e": metrics.finished_ts - metrics.queued_ts,
    }
    if metrics.scheduled_ts:
        found["gen_ai.latency.time_in_queue"] = max(0.0, metrics.scheduled_ts - metrics.queued_ts)
    if metrics.first_token_ts:
        found |= {
            "gen_ai.latency.time_to_first_token": metrics.first_token_latency,
            "gen_ai.latency.time_in_model_prefill": max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
            "gen_ai.latency.time_in_model_decode": metrics.last_token_ts - metrics.first_token_ts,
            "gen_ai.latency.time_in_model_inference": max(0.0, metrics.last_token_ts - metrics.scheduled_ts),
        }
    return {name: value for name, value in found.items() if value is not None}


def make_exporter(endpoint: str) -> "SpanExporter":
    """Speaks gRPC, or HTTP if the environment asks for it."""
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{PROTOCOL_VARIABLE} must be grpc or http/protobuf, got {protocol!r}")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint=endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    except ImportError as error:
        raise ConfigError(f"--otlp-traces-endpoint needs the extra otel: pip install 'quire[otel]' ({error})") from None
