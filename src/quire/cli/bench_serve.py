"""`quire bench serve`: load an OpenAI server and measure it. The flags are those of vLLM's command of that name."""

import argparse
import asyncio
import datetime
import math
import os
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.types.errors import ConfigError
from quire.types.json_text import read_json

if TYPE_CHECKING:
    from quire.bench.datasets import DatasetOptions
    from quire.bench.metrics import RunSummary
    from quire.bench.openai import Kind
    from quire.bench.serve import Outcome, ServeSettings

CHAT = "/v1/chat/completions"
BACKENDS = {
    "openai": "completions", "vllm": "completions", "openai-chat": "chat", "openai-embeddings": "embeddings",
    "vllm-rerank": "rerank",
}  # fmt: skip
ENDPOINTS = {
    "completions": "/v1/completions", "chat": CHAT, "embeddings": "/v1/embeddings", "rerank": "/rerank"
}  # fmt: skip
DEFAULT_METRICS = "ttft,tpot,itl,e2el"
DATASETS = ("random", "random-mm", "sharegpt", "custom", "prefix_repetition", "timed_trace")
YES: dict[str, Any] = {"action": "store_true"}
N: dict[str, Any] = {"type": int, "metavar": "N"}
X: dict[str, Any] = {"type": float, "metavar": "X"}

Flags = tuple[tuple[str, str, dict[str, Any]], ...]  # name, help, options of argparse; the default is None

SERVER: Flags = (
    ("base-url", "the server, such as https://host:8000, instead of --host and --port", {"metavar": "URL"}),
    ("host", "(default 127.0.0.1)", {}),
    ("port", "(default 8000)", N),
    (
        "backend",
        "completions (openai, vllm), chat (openai-chat), embeddings (openai-embeddings) or reranking (vllm-rerank) (default: "
        "by the endpoint)",
        {"choices": tuple(BACKENDS)},
    ),
    (
        "endpoint",
        f"a path, or embeddings or rerank for the usual path of these (default /v1/completions; {CHAT} for chat)",
        {"metavar": "PATH"},
    ),
    ("model", "the model's name in requests (default: the first of /v1/models)", {"metavar": "NAME"}),
    ("api-key", "sent as a bearer token (default: QUIRE_API_KEY, VLLM_API_KEY or OPENAI_API_KEY)", {"metavar": "KEY"}),
    ("header", "further headers", {"metavar": "NAME=VALUE", "nargs": "+", "action": "extend", "default": []}),
    ("insecure", "do not check the server's certificate", YES),
    ("request-timeout", "a request that takes longer, in seconds, has failed (default 21600)", X | {"default": 21600.0}),
    ("ready-check-timeout-sec", "wait this long for the server to be ready (default 0)", X | {"default": 0.0}),
    ("request-id-prefix", "of the X-Request-Id header (default: a random one)", {"metavar": "TEXT"}),
)
OTHER_SPELLINGS = {"dataset-name": ("--dataset",)}
# Each flag belongs to the data set whose name it begins with; DatasetOptions has the defaults.
DATASET: Flags = (
    ("random-input-len", "tokens of each prompt, after the prefix (default 1024)", N),
    ("random-output-len", "output tokens of each request (default 128)", N),
    ("random-range-ratio", "lengths are spread evenly over length * (1 - X) to length * (1 + X) (default 0)", X),
    ("random-prefix-len", "tokens that all prompts begin with (default 0)", N),
    ("random-mm-base-items-per-request", "pictures and videos of each request (default 1)", N),
    ("random-mm-num-mm-items-range-ratio", "their number is spread as lengths are (default 0)", X),
    ("random-mm-limit-mm-per-prompt", 'most of each kind (default {"image": 255, "video": 1})', {"metavar": "DICT"}),
    (
        "random-mm-bucket-config",
        "shares of sizes, {(height, width, frames): share}; more than one frame: a video (default {(256, 256, 1): 0.5, "
        "(720, 1280, 1): 0.5})",
        {"metavar": "DICT"},
    ),
    ("prefix-repetition-prefix-len", "tokens of each prefix (default 256)", N),
    ("prefix-repetition-suffix-len", "tokens after it, different in each prompt (default 256)", N),
    ("prefix-repetition-num-prefixes", "different prefixes (default 10)", N),
    ("prefix-repetition-output-len", "output tokens of each request (default 128)", N),
    ("sharegpt-output-len", "output tokens of each request (default: those of the recorded answer)", N),
    ("custom-output-len", "output tokens of a line without output_tokens (default 256)", N),
    ("timed-trace-chunk-hash-size", "tokens of the block that each hash id stands for (default 512)", N),
    ("timed-trace-sec-multiplier", "seconds in a unit of the trace's timestamps (default 0.001)", X),
)
SAMPLING: Flags = tuple(
    (name, "sent with every request (default: the server's)", kind)
    for name, kind in (
        ("temperature", X),
        ("top-p", X),
        ("top-k", N),
        ("min-p", X),
        ("frequency-penalty", X),
        ("presence-penalty", X),
        ("repetition-penalty", X),
    )
)
REQUESTS: Flags = (
    ("dataset-name", "(default random)", {"choices": DATASETS, "default": "random"}),
    ("dataset-path", "of sharegpt (JSON), custom and timed_trace (JSON lines)", {"metavar": "FILE"}),
    ("num-prompts", "requests (default 1000)", N | {"default": 1000}),
    ("seed", "of random prompts, their order and arrivals (default 0)", N | {"default": 0}),
    (
        "prompt-format",
        "random prompts as token ids or as words (default: ids, where endpoint and server allow it)",
        {"choices": ("auto", "ids", "text"), "default": "auto"},
    ),
    ("vocab-size", "random token ids are below this (default: from the server's /tokenize)", N),
    ("disable-shuffle", "keep the order of the data set", YES),
    ("no-oversample", "do not repeat samples when the data set has too few", YES),
    *DATASET,
    ("ignore-eos", "do not stop at the end-of-sequence token", YES),
    *SAMPLING,
    ("extra-body", "further fields of every request; they override the others", {"metavar": "JSON"}),
)
LOAD: Flags = (
    ("request-rate", "requests per second; inf is all at once (default inf)", X | {"default": math.inf}),
    (
        "burstiness",
        "shape of the gamma distributed gaps: 1 is Poisson, below comes in bursts, above is steadier (default 1)",
        X | {"default": 1.0},
    ),
    ("max-concurrency", "maximum of requests at once; with an infinite rate, a closed loop (default: no limit)", N),
    ("ramp-up-strategy", "increase the rate during the run", {"choices": ("linear", "exponential")}),
    ("ramp-up-start-rps", "requests per second at the start", X),
    ("ramp-up-end-rps", "requests per second at the end", X),
    ("self-timed", "send at the times of the data set (default: for timed_trace)", {"action": argparse.BooleanOptionalAction}),
    ("num-warmups", "requests before the measured ones (default 0)", N | {"default": 0}),
    ("profile", "profile the engines during the run; the server must have been started with --profiler-config", YES),
)
REPORT: Flags = (
    (
        "goodput",
        "count requests within all these bounds, such as ttft:200 tpot:50 e2el:3000",
        {"metavar": "METRIC:MS", "nargs": "+", "default": []},
    ),
    (
        "percentile-metrics",
        "of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue (default ttft,tpot,itl,e2el; e2el for "
        "embeddings and rerank)",
        {"metavar": "NAMES"},
    ),
    ("metric-percentiles", "(default 50,90,99)", {"metavar": "LIST", "default": "50,90,99"}),
    ("save-result", "write the result as JSON (default: a name from the run)", {"metavar": "FILE", "nargs": "?", "const": ""}),
    ("result-dir", "write the result into this directory", {"metavar": "DIR"}),
    ("result-filename", "the same as --save-result FILE", {"metavar": "FILE"}),
    ("save-detailed", "write every request's figures and text into the result, too", YES),
    ("metadata", "written into the result", {"metavar": "NAME=VALUE", "nargs": "+", "default": []}),
    ("label", "written into the result and its name (default: the backend)", {"metavar": "TEXT"}),
    ("compare", "print ratios to a saved result", {"metavar": "FILE", "type": Path}),
    ("disable-tqdm", "no progress bar", YES),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_groups(parser, (("server", SERVER), ("requests", REQUESTS), ("load", LOAD), ("report", REPORT)))


def add_groups(parser: argparse.ArgumentParser, groups: Iterable[tuple[str, Flags]]) -> None:
    for title, flags in groups:
        group = parser.add_argument_group(title)
        for name, text, options in flags:
            group.add_argument(f"--{name}", *OTHER_SPELLINGS.get(name, ()), help=text, **options)


NOTHING_SUCCEEDED, INTERRUPTED = 1, 130
DESCRIPTION = """\
Sends streaming requests to any OpenAI server, all at once, in a closed loop (--max-concurrency) or as random arrivals
(--request-rate), and reports throughput and the distribution of latencies. TTFT: from sending a request to its first token.
TPOT: time per token after the first. ITL: one value per token after the first, the time since its predecessor;
tokens of one chunk arrive together. E2EL: from sending a request to the end of its answer."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        usage="%(prog)s [options]",
        help="load an OpenAI server and measure throughput and latencies",
        description=DESCRIPTION,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    from quire.bench.metrics import read_goodput, read_metrics, read_percentiles, summarize
    from quire.bench.report import comparison, error_lines, read_result, save, table
    from quire.bench.serve import bench_serve

    settings = settings_of(namespace)
    wanted = namespace.percentile_metrics or ("e2el" if settings.pools else DEFAULT_METRICS)
    metrics, cuts = read_metrics(wanted), read_percentiles(namespace.metric_percentiles)
    goodput = read_goodput(namespace.goodput)
    pairs(namespace.metadata, "--metadata")
    if namespace.save_result and namespace.result_filename:
        raise ConfigError("--save-result and --result-filename both name the file; drop one")
    then = read_result(namespace.compare, "serve") if namespace.compare else None
    where = f"{settings.origin.path(settings.endpoint)} of {settings.origin}"
    print(f"{settings.dataset.count:,} requests ({settings.dataset.name}), {settings.load_text}, to {where}", file=sys.stderr)

    outcome = asyncio.run(bench_serve(settings))
    summary = summarize(outcome.records, outcome.duration, metrics=metrics, percentiles=cuts, goodput=goodput)
    facts = {"Model": outcome.model, "Load": settings.load_text}
    print(table(summary, "Serving Benchmark Result", facts))
    for note in outcome.notes:
        print(f"note: {note}")
    for line in error_lines(outcome.records):
        print(f"failed: {line}")
    for trace in outcome.traces:
        print(f"profile: {trace}")
    result = result_of(namespace, settings, outcome, summary)
    if then is not None:
        print(comparison(result, then, namespace.compare.name))
    path = result_path(namespace, outcome.model)
    if path is not None:
        save(result, path)
        print(f"saved: {path}")
    if outcome.interrupted:
        return INTERRUPTED
    return 0 if summary.completed else NOTHING_SUCCEEDED


def result_of(
    namespace: argparse.Namespace, settings: "ServeSettings", outcome: "Outcome", summary: "RunSummary"
) -> dict[str, Any]:
    """Return the result to save: figures under vLLM's names, and everything needed to repeat the measurement."""
    from quire.bench.machine import provenance
    from quire.bench.report import details, error_lines

    backend = next(name for name, kind in BACKENDS.items() if kind == settings.kind)
    hidden = ("run", "command", "measurement", "api_key", "header")
    flags = {name: plain(value) for name, value in vars(namespace).items() if name not in hidden}
    result = {
        "kind": "serve",
        **provenance(sys.argv),
        "label": namespace.label or backend,
        "backend": backend,
        "model_id": outcome.model,
        "base_url": str(settings.origin),
        "endpoint": settings.endpoint,
        "server_version": outcome.server_version,
        "prompts": outcome.prompts,
        "num_prompts": settings.dataset.count,
        "request_rate": plain(settings.shape.request_rate),
        "burstiness": settings.shape.burstiness,
        "max_concurrency": settings.shape.max_concurrency,
        "interrupted": outcome.interrupted,
        "flags": flags,
        **pairs(namespace.metadata, "--metadata"),
        **summary.as_dict(),
        "first_errors": error_lines(outcome.records),
        "notes": list(outcome.notes),
        "traces": list(outcome.traces),
    }
    if namespace.save_detailed:
        result |= details(outcome.records)
    return result


def plain(value: Any) -> Any:
    """Return a flag's value for JSON: no infinities, no paths."""
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return str(value) if isinstance(value, Path) else value


def result_path(namespace: argparse.Namespace, model: str) -> Path | None:
    """Return where to save the result, or None if no flag requests it."""
    given = namespace.save_result or namespace.result_filename
    if not given:
        if namespace.save_result is None and not namespace.result_dir and not namespace.save_detailed:
            return None
        rate = f"{namespace.request_rate:g}qps" + (
            f"-concurrency{namespace.max_concurrency}" if namespace.max_concurrency else ""
        )
        label = namespace.label or namespace.backend or "openai"
        given = f"{label}-{rate}-{Path(model).name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    return Path(namespace.result_dir or ".", given)


KEYS = ("QUIRE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")


def settings_of(namespace: argparse.Namespace) -> "ServeSettings":
    from quire.bench.arrivals import LoadShape
    from quire.bench.client import Origin
    from quire.bench.serve import ServeSettings

    if namespace.base_url is not None and (namespace.host is not None or namespace.port is not None):
        raise ConfigError("--base-url includes host and port; drop --host and --port")
    if not namespace.request_timeout > 0:
        raise ConfigError(f"--request-timeout must be above 0, got {namespace.request_timeout}")
    host, port = namespace.host or "127.0.0.1", 8000 if namespace.port is None else namespace.port
    kind, endpoint = endpoint_of(namespace.backend, namespace.endpoint)
    return ServeSettings(
        Origin.parse(namespace.base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"),
        endpoint,
        kind,
        namespace.model,
        headers_of(namespace),
        namespace.insecure,
        namespace.request_timeout,
        namespace.ready_check_timeout_sec,
        dataset_of(namespace),
        namespace.prompt_format,
        namespace.vocab_size,
        namespace.self_timed,
        fields_of(namespace),
        LoadShape(
            namespace.request_rate,
            namespace.burstiness,
            namespace.max_concurrency,
            namespace.ramp_up_strategy,
            namespace.ramp_up_start_rps,
            namespace.ramp_up_end_rps,
        ),
        namespace.num_warmups,
        f"bench-{uuid.uuid4().hex[:8]}-" if namespace.request_id_prefix is None else namespace.request_id_prefix,
        namespace.save_detailed,
        namespace.disable_tqdm,
        namespace.profile,
    )


def endpoint_of(backend: str | None, endpoint: str | None) -> tuple["Kind", str]:
    """Return the kind of the requests and the path that they go to. Each follows from the other."""
    endpoint = ENDPOINTS.get(endpoint or "", endpoint) if endpoint in ("embeddings", "rerank") else endpoint
    path = (endpoint or "").rstrip("/")
    told = next((kind for kind, usual in ENDPOINTS.items() if kind != "completions" and path.endswith(_ending(usual))), None)
    if told is None and path.endswith("/completions"):
        told = "completions"
    kind = (told or "completions") if backend is None else BACKENDS[backend]
    if told is not None and kind != told:
        raise ConfigError(f"--backend {backend} does not match --endpoint {endpoint}; drop one of them")
    return cast("Kind", kind), endpoint or ENDPOINTS[kind]


def _ending(path: str) -> str:
    return path.removeprefix("/v1")


def dataset_of(namespace: argparse.Namespace) -> "DatasetOptions":
    from quire.bench.datasets import DatasetOptions

    own: dict[str, Any] = {}
    for flag, _, _ in DATASET:
        name = flag.replace("-", "_")
        value = getattr(namespace, name, None)
        if value is None:
            continue
        if not _belongs(name, namespace.dataset_name.replace("-", "_")):
            raise ConfigError(f"--{flag} does not belong to --dataset-name {namespace.dataset_name}")
        own[name] = value
    return DatasetOptions(
        namespace.dataset_name,
        namespace.dataset_path,
        namespace.num_prompts,
        namespace.seed,
        not namespace.disable_shuffle,
        not namespace.no_oversample,
        **own,
    )


def _belongs(flag: str, dataset: str) -> bool:
    """Return whether a flag is of a data set. Those of `random` are of `random-mm`, too."""
    if dataset == "random_mm":
        return flag.startswith("random")
    return flag.startswith(dataset) and not flag.startswith("random_mm")


def headers_of(namespace: argparse.Namespace) -> dict[str, str]:
    key = namespace.api_key or next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
    own = {"authorization": f"Bearer {key}"} if key else {}
    return own | {name.lower(): value for name, value in pairs(namespace.header, "--header").items()}


def fields_of(namespace: argparse.Namespace) -> dict[str, Any]:
    values = {flag.replace("-", "_"): getattr(namespace, flag.replace("-", "_")) for flag, _, _ in SAMPLING}
    fields = {name: value for name, value in values.items() if value is not None}
    if namespace.ignore_eos:
        fields["ignore_eos"] = True
    if namespace.extra_body is not None:
        try:
            extra = read_json(namespace.extra_body)
        except ValueError as error:
            raise ConfigError(f"--extra-body is not JSON: {error}") from None
        if not isinstance(extra, dict):
            raise ConfigError("--extra-body is not a JSON object")
        fields |= extra
    return fields


def pairs(texts: list[str], flag: str) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} {text!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    return found
