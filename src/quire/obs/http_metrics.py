"""Metrics of HTTP itself, under the names that FastAPI servers usually have them."""

from prometheus_client import CollectorRegistry

from quire.obs.instruments import Board, Counter, Histogram, Summary

METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
COARSE = (0.1, 0.5, 1.0)
FINE = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        board = self.board = Board("", {})
        self.requests = board.add(
            Counter("http_requests", "Requests by method, status and route", ("method", "status", "handler"))
        )
        self.received = board.add(Summary("http_request_size_bytes", "Content length of requests", ("handler",)))
        self.sent = board.add(Summary("http_response_size_bytes", "Bytes of response bodies", ("handler",)))
        self.duration = board.add(
            Histogram("http_request_duration_seconds", "Duration of requests", COARSE, ("method", "handler"))
        )
        self.duration_fine = board.add(
            Histogram("http_request_duration_highr_seconds", "Duration of requests, with many buckets", FINE)
        )
        self.closed_unread = board.add(
            Counter("http_connections_closed_unread", "Connections closed because their client did not read the answer")
        )
        registry.register(board)

    def record(self, method: str, handler: str, status: int, seconds: float, received: int, sent: int) -> None:
        """`handler` is the matched route's template, so that clients cannot make up labels."""
        method = method if method in METHODS else "other"
        self.requests.add(1, method, f"{status // 100}xx", handler)
        self.received.observe(received, handler)
        self.sent.observe(sent, handler)
        self.duration.observe(seconds, method, handler)
        self.duration_fine.observe(seconds)
