"""The flags of `quire bench serve`, under the names that vLLM's command has."""

import argparse
import math
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
DATASETS = ("random", "sharegpt", "custom", "prefix_repetition", "timed_trace")
YES: dict[str, Any] = {"action": "store_true"}
N: dict[str, Any] = {"type": int, "metavar": "N"}
X: dict[str, Any] = {"type": float, "metavar": "X"}

Flags = tuple[tuple[str, str, dict[str, Any]], ...]  # name, help, and what argparse wants to know; the default is None

SERVER: Flags = (
    ("base-url", "the server, such as https://host:8000, instead of --host and --port", {"metavar": "URL"}),
    ("host", "(default 127.0.0.1)", {}),
    ("port", "(default 8000)", N),
    (
        "backend",
        "completions (openai, vllm) or chat (openai-chat) (default: by the endpoint)",
        {"choices": ("openai", "vllm", "openai-chat")},
    ),
    ("endpoint", f"(default /v1/completions; {CHAT} for chat)", {"metavar": "PATH"}),
    ("model", "the model's name in requests (default: the first of /v1/models)", {"metavar": "NAME"}),
    ("api-key", "sent as a bearer token (default: QUIRE_API_KEY, VLLM_API_KEY or OPENAI_API_KEY)", {"metavar": "KEY"}),
    ("header", "further headers", {"metavar": "NAME=VALUE", "nargs": "+", "action": "extend", "default": []}),
    ("insecure", "do not check the server's certificate", YES),
    ("request-timeout", "a request that takes longer, in seconds, has failed (default 21600)", X | {"default": 21600.0}),
    ("ready-check-timeout-sec", "wait this long for the server to be ready (default 0)", X | {"default": 0.0}),
    ("request-id-prefix", "of the X-Request-Id header (default: a random one)", {"metavar": "TEXT"}),
)
# Each belongs to the data set whose name it begins with; DatasetOptions has the defaults.
DATASET: Flags = (
    ("random-input-len", "tokens of each prompt, after the prefix (default 1024)", N),
    ("random-output-len", "tokens to ask for (default 128)", N),
    ("random-range-ratio", "lengths are spread evenly over length * (1 - X) to length * (1 + X) (default 0)", X),
    ("random-prefix-len", "tokens that all prompts begin with (default 0)", N),
    ("prefix-repetition-prefix-len", "tokens of each prefix (default 256)", N),
    ("prefix-repetition-suffix-len", "tokens after it, different in each prompt (default 256)", N),
    ("prefix-repetition-num-prefixes", "different prefixes (default 10)", N),
    ("prefix-repetition-output-len", "tokens to ask for (default 128)", N),
    ("sharegpt-output-len", "tokens to ask for (default: as many as the recorded answer has)", N),
    ("custom-output-len", "tokens to ask for where a line has no output_tokens (default 256)", N),
    ("timed-trace-chunk-hash-size", "tokens that one of a line's hash_ids stands for (default 512)", N),
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
    ("vocab-size", "random token ids are below this (default: asked from the server's /tokenize)", N),
    ("disable-shuffle", "keep the order of the data set", YES),
    ("no-oversample", "do not repeat samples when the data set has too few", YES),
    *DATASET,
    ("ignore-eos", "generate as many tokens as asked for, past any end", YES),
    *SAMPLING,
    ("extra-body", "further fields of every request; they win", {"metavar": "JSON"}),
)
LOAD: Flags = (
    ("request-rate", "requests per second; inf is all at once (default inf)", X | {"default": math.inf}),
    (
        "burstiness",
        "shape of the gamma distributed gaps: 1 is Poisson, below comes in bursts, above is steadier (default 1)",
        X | {"default": 1.0},
    ),
    ("max-concurrency", "most requests at once; with an infinite rate, the closed loop (default: no limit)", N),
    ("ramp-up-strategy", "let the rate grow over the run", {"choices": ("linear", "exponential")}),
    ("ramp-up-start-rps", "requests per second at the start", X),
    ("ramp-up-end-rps", "requests per second at the end", X),
    ("self-timed", "send when the data set says (default: for timed_trace)", {"action": argparse.BooleanOptionalAction}),
    ("num-warmups", "requests before the measured ones (default 0)", N | {"default": 0}),
)
REPORT: Flags = (
    (
        "goodput",
        "count requests within all these bounds, such as ttft:200 tpot:50 e2el:3000",
        {"metavar": "METRIC:MS", "nargs": "+", "default": []},
    ),
    (
        "percentile-metrics",
        "of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue (default ttft,tpot,itl,e2el)",
        {"metavar": "NAMES", "default": "ttft,tpot,itl,e2el"},
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
    for title, flags in (("server", SERVER), ("requests", REQUESTS), ("load", LOAD), ("report", REPORT)):
        group = parser.add_argument_group(title)
        for name, text, options in flags:
            group.add_argument(f"--{name}", help=text, **options)
