"""The flags of `quire bench serve` as the settings of a run."""

import argparse
import os
import uuid
from typing import Any

from quire.bench.arrivals import LoadShape
from quire.bench.client import Origin
from quire.bench.datasets.options import DatasetOptions
from quire.bench.serve import ServeSettings
from quire.cli.bench_serve_flags import CHAT, DATASET, SAMPLING
from quire.types.errors import ConfigError
from quire.types.json_text import read_json

KEYS = ("QUIRE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")


def settings_of(namespace: argparse.Namespace) -> ServeSettings:
    if namespace.base_url is not None and (namespace.host is not None or namespace.port is not None):
        raise ConfigError("--base-url says host and port; drop --host and --port")
    if not namespace.request_timeout > 0:
        raise ConfigError(f"--request-timeout must be above 0, got {namespace.request_timeout}")
    host, port = namespace.host or "127.0.0.1", 8000 if namespace.port is None else namespace.port
    chat, endpoint = endpoint_of(namespace.backend, namespace.endpoint)
    return ServeSettings(
        Origin.parse(namespace.base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"),
        endpoint,
        chat,
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
    )


def endpoint_of(backend: str | None, endpoint: str | None) -> tuple[bool, str]:
    """Whether to chat, and where. Each follows from the other."""
    says_chat = endpoint is not None and endpoint.rstrip("/").endswith("/chat/completions")
    chat = says_chat if backend is None else backend == "openai-chat"
    if endpoint is not None and endpoint.rstrip("/").endswith("/completions") and chat != says_chat:
        raise ConfigError(f"--backend {backend} does not speak to {endpoint}; drop one of them")
    return chat, endpoint or (CHAT if chat else "/v1/completions")


def dataset_of(namespace: argparse.Namespace) -> DatasetOptions:
    own: dict[str, Any] = {}
    for flag, _, _ in DATASET:
        name = flag.replace("-", "_")
        value = getattr(namespace, name)
        if value is None:
            continue
        if not name.startswith(namespace.dataset_name):
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
