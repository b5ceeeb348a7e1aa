# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""All fields of the HTTP server that a user can set, for `quire serve` and the app.

Names and defaults are vLLM's, except where a default would open the server to the network or cut a stream off: it listens on
loopback, answers no other origin, and drains for half a minute. The engine's own fields are in `args`.
"""

import argparse
import dataclasses
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.args import nearest
from quire.config.fields import FLAG, LIST, MODULES, NUMBER, OBJECT, REAL, TEXT, setting, spec_of
from quire.config.flags import add_flags, add_hidden_flags, kind_of
from quire.config.vllm_arguments import SERVER_HINTS, SERVER_REFUSED, refuse, take_hint
from quire.types.errors import ConfigError

_BIND, _SECURITY, _ANSWERS, _RUN, _SEEN = "network", "security", "answers", "running", "logs and metrics"
_TOOLS, _ADAPTERS = "tools and reasoning", "LoRA adapters (with --enable-lora)"
_BATCHES = "batches (with --batch-dir)"
PROBES = "/livez,/readyz,/health,/ping,/metrics"  # requested every few seconds by other machines
_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass
class ServerArgs:
    host: str = setting(
        "127.0.0.1", TEXT, _BIND, "address to listen on; one that others can reach needs --api-key or --no-auth"
    )
    port: int = setting(8000, NUMBER, _BIND, "port to listen on; 0 takes a free one", low=0, high=65535)
    uds: str | None = setting(None, TEXT, _BIND, "path of a Unix socket to listen on, instead of host and port")
    root_path: str = setting("", TEXT, _BIND, "path under which a proxy publishes this server, such as /llm")
    ssl_keyfile: str | None = setting(None, TEXT, _BIND, "file with the private key of the TLS certificate")
    ssl_certfile: str | None = setting(None, TEXT, _BIND, "file with the TLS certificate")
    ssl_ca_certs: str | None = setting(None, TEXT, _BIND, "file with the authorities that client certificates are checked with")
    ssl_cert_reqs: int = setting(0, NUMBER, _BIND, "client certificates: 0 none, 1 optional, 2 required", low=0, high=2)
    ssl_ciphers: str | None = setting(None, TEXT, _BIND, "ciphers for TLS, in OpenSSL's notation")

    api_key: list[str] | None = setting(
        None, LIST, _SECURITY,
        "one or more keys; requests must carry one as a bearer token. Default: QUIRE_API_KEY or VLLM_API_KEY. "
        "With several, each has its own prefix cache",
    )  # fmt: skip
    auth: bool = setting(
        True, FLAG, _SECURITY, "--no-auth: every client that reaches the server may use it, also from other machines"
    )
    metrics_without_key: bool = setting(False, FLAG, _SECURITY, "/metrics needs no API key, for a Prometheus without one")
    allowed_hosts: list[str] = setting(
        [], LIST, _SECURITY,
        "allowed names in the Host header, besides loopback names and the address itself; *.example.com: all subdomains, "
        "*: any. Default: any, but none on loopback without an API key, where web pages could use DNS rebinding",
    )  # fmt: skip
    allowed_origins: list[str] = setting(
        [], LIST, _SECURITY, "web origins whose pages may call the server (CORS); default: none"
    )
    allowed_methods: list[str] = setting(["*"], LIST, _SECURITY, "methods those pages may use; default: all")
    allowed_headers: list[str] = setting(["*"], LIST, _SECURITY, "headers those pages may send; default: all")
    allow_credentials: bool = setting(False, FLAG, _SECURITY, "those pages may send cookies and credentials")
    trust_request_chat_template: bool = setting(False, FLAG, _SECURITY, "requests may have their own chat template")

    accept_any_model_name: bool = setting(
        False, FLAG, _ANSWERS, "requests may name any model (gpt-4o, ...) and get this one, or the LoRA adapter of that name"
    )
    response_role: str = setting("assistant", TEXT, _ANSWERS, "role of the messages the model writes")
    return_tokens_as_token_ids: bool = setting(False, FLAG, _ANSWERS, "logprobs name tokens as token_id:N instead of by text")
    enable_force_include_usage: bool = setting(
        False, FLAG, _ANSWERS, "every chunk of a stream has usage, also without include_usage"
    )
    enable_prompt_tokens_details: bool = setting(True, FLAG, _ANSWERS, "usage includes the number of cached prompt tokens")
    enable_per_request_metrics: bool = setting(False, FLAG, _ANSWERS, "every answer has its own times")
    enable_request_id_headers: bool = setting(True, FLAG, _ANSWERS, "responses have X-Request-Id")
    enable_tokenizer_info_endpoint: bool = setting(False, FLAG, _ANSWERS, "/tokenizer_info returns the tokenizer's settings")
    disable_fastapi_docs: bool = setting(False, FLAG, _ANSWERS, "no /docs, /redoc and /openapi.json")
    disable_page: bool = setting(False, FLAG, _ANSWERS, "no page at / and no /engine/events")

    enable_auto_tool_choice: bool = setting(False, FLAG, _TOOLS, "accepted for vLLM; tool_choice=auto works without it, too")
    tool_call_parser: str | None = setting(
        None,
        TEXT,
        _TOOLS,
        "format of the model's tool calls: hermes, mistral, ... (docs/tools.md); auto, the default: by its chat template",
    )
    tool_parser_plugin: str | None = setting(None, TEXT, _TOOLS, "Python file that registers formats of tool calls")
    exclude_tools_when_tool_choice_none: bool = setting(
        False, FLAG, _TOOLS, "with tool_choice=none the chat template does not see the tools"
    )
    reasoning_parser: str = setting(
        "", TEXT, _TOOLS, "format of the model's reasoning: qwen3, deepseek_r1, ... ; auto: by its chat template"
    )
    reasoning_config: dict[str, object] = setting(
        {}, OBJECT, _TOOLS, "reasoning_start_str and reasoning_end_str: text that opens the reasoning, and text that ends it "
        "when thinking_token_budget is spent; each contains the parser's mark. Default: the marks alone",
    )  # fmt: skip
    reasoning_parser_plugin: str | None = setting(None, TEXT, _TOOLS, "Python file that registers formats of reasoning")
    chat_template_content_format: str = setting(
        "auto", TEXT, _TOOLS, "content for the chat template: string, openai (a list of parts), auto: what it reads",
        choices=("auto", "string", "openai"),
    )  # fmt: skip
    default_chat_template_kwargs: dict[str, object] = setting(
        {}, OBJECT, _TOOLS, 'variables for the chat template, under those of the request: {"enable_thinking": false}'
    )

    lora_modules: list[Any] = setting(
        [], MODULES, _ADAPTERS,
        'adapters and their directories: name=path, or {"name": ..., "path": ..., "base_model_name": ...}',
    )  # fmt: skip
    allow_runtime_lora_updating: bool = setting(
        False, FLAG, _ADAPTERS, "/v1/load_lora_adapter and /v1/unload_lora_adapter; or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )
    allowed_lora_path: str | None = setting(
        None, TEXT, _ADAPTERS, "the folder that clients may load adapters from; default: any that the server can read"
    )
    lora_resolver_dir: str | None = setting(
        None, TEXT, _ADAPTERS, "a folder whose subfolders are adapters, found by name; default: VLLM_LORA_RESOLVER_CACHE_DIR"
    )
    lora_resolver: list[str] = setting(
        [], LIST, _ADAPTERS, "resolvers of installed packages (entry points quire.lora_resolvers) for other names"
    )

    batch_dir: str | None = setting(
        None, TEXT, _BATCHES, "a folder for /v1/files and /v1/batches, which survive a restart there; default: no such routes"
    )
    batch_concurrency: int | None = setting(
        None, NUMBER, _BATCHES, "lines of batches in flight while the server is idle; with other requests a 16th of it, and "
        "on a CPU none; default: 3/4 of max_num_seqs for each engine", low=1,
    )  # fmt: skip
    batch_lines: int = setting(50_000, NUMBER, _BATCHES, "most lines of a batch", low=1)
    batch_file_bytes: int = setting(
        200 * 2**20, NUMBER, _BATCHES, "most bytes of an uploaded file; larger ones are a 413", low=1, high=200 * 2**20
    )
    batch_files: int = setting(
        10_000, NUMBER, _BATCHES, "most files of an API key, and most batches; of these the oldest that have ended make room",
        low=1,
    )  # fmt: skip
    batch_disk_bytes: int = setting(
        20 * 2**30, NUMBER, _BATCHES, "most bytes in the folder; of several API keys, none may take more than it leaves to "
        "others", low=1,
    )  # fmt: skip

    api_server_count: int = setting(
        1, NUMBER, _RUN, "API processes on the port, in front of the same engines; each tokenizes and detokenizes", low=1,
        high=64, short="-asc",
    )  # fmt: skip
    headless: bool = setting(
        False,
        FLAG,
        _RUN,
        "no API on this machine: it has ranks of an engine that machine 0 serves (--node-rank), or engines (-dpr)",
    )
    shutdown_timeout: float = setting(
        30.0, REAL, _RUN, "seconds for running requests to finish after SIGTERM or Ctrl-C; then they are aborted", low=0.0
    )
    timeout_keep_alive: int = setting(
        5, NUMBER, _RUN, "seconds that a connection may stay open between two requests; more than a proxy's in front", low=1
    )
    open: bool = setting(False, FLAG, _RUN, "open the page in a browser when the server is ready")
    sample: str | None = setting(None, TEXT, _RUN, "a question that is answered on standard output when the server is ready")
    max_queue: int = setting(2048, NUMBER, _RUN, "/readyz is 503 while more requests than this wait", low=0)

    log_format: str | None = setting(
        None, TEXT, _SEEN, "text, or one JSON object per line, in every process; default: QUIRE_LOGGING_FORMAT or text",
        choices=("text", "json"),
    )  # fmt: skip
    log_config_file: str | None = setting(
        None, TEXT, _SEEN, "JSON file for logging.config.dictConfig: loggers quire and uvicorn in every process; default: "
        "QUIRE_LOGGING_CONFIG_PATH or VLLM_LOGGING_CONFIG_PATH",
    )  # fmt: skip
    uvicorn_log_level: str = setting("info", TEXT, _SEEN, "log level of the HTTP server", choices=_LEVELS)
    disable_uvicorn_access_log: bool = setting(False, FLAG, _SEEN, "no log line per HTTP request")
    disable_access_log_for_endpoints: str = setting(
        PROBES, TEXT, _SEEN, 'paths without a log line per HTTP request, separated by commas; "" logs all'
    )
    enable_log_requests: bool = setting(False, FLAG, _SEEN, "log every request with its parameters; prompts at debug level")
    enable_log_outputs: bool = setting(False, FLAG, _SEEN, "log generated text; needs --enable-log-requests")
    enable_log_deltas: bool = setting(
        True, FLAG, _SEEN, "with --enable-log-outputs: log every delta of a stream; --no-enable-log-deltas: whole answers only"
    )
    max_log_len: int | None = setting(
        None, NUMBER, _SEEN, "maximum of characters or token ids of a prompt or output to log", low=0
    )
    enable_server_load_tracking: bool = setting(False, FLAG, _SEEN, "/load returns the number of open requests")
    metrics_prefix: str = setting(
        "quire", TEXT, _SEEN, "prefix of metric names; vllm for dashboards made for it", choices=("quire", "vllm")
    )
    otlp_traces_endpoint: str | None = setting(None, TEXT, _SEEN, "OpenTelemetry endpoint, such as http://host:4317")

    @property
    def unlogged_paths(self) -> list[str]:
        """Return the paths without an access log line, with and without the proxy's path before them."""
        named = [path.strip() for path in self.disable_access_log_for_endpoints.split(",") if path.strip()]
        root = self.root_path.rstrip("/")
        return [*named, *(root + path for path in named if root)]

    def export_logging(self, environment: MutableMapping[str, str]) -> None:
        """Set the environment variables by which the processes of this server log."""
        if self.log_format is not None:
            environment["QUIRE_LOGGING_FORMAT"] = self.log_format
        if self.log_config_file is not None:
            environment["QUIRE_LOGGING_CONFIG_PATH"] = str(Path(self.log_config_file).expanduser().absolute())

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            optional = field.default is None
            setattr(self, field.name, spec_of(field).check(field.name, getattr(self, field.name), optional))
        self._check()

    def _check(self) -> None:
        """Refuse settings that are not supported together."""
        if not self.auth and self.api_key:
            raise ConfigError("--no-auth and --api-key contradict each other: leave one of them out")
        if self.api_key is not None and not all(key.strip() for key in self.api_key):
            raise ConfigError("an API key is empty: give a secret, or leave --api-key out")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigError(f"TLS needs --ssl-keyfile and --ssl-certfile; {missing} is missing")
        if self.ssl_keyfile is None and (self.ssl_ca_certs or self.ssl_cert_reqs or self.ssl_ciphers):
            raise ConfigError("ssl_ca_certs, ssl_cert_reqs and ssl_ciphers need --ssl-keyfile and --ssl-certfile")
        if self.enable_log_outputs and not self.enable_log_requests:
            raise ConfigError("--enable-log-outputs needs --enable-log-requests")
        unknown = {*self.reasoning_config} - {"reasoning_start_str", "reasoning_end_str"}
        if unknown or not all(isinstance(text, str | None) for text in self.reasoning_config.values()):
            raise ConfigError(
                f"reasoning_config must map reasoning_start_str and reasoning_end_str to text; got {self.reasoning_config!r}"
            )
        if self.reasoning_config and not self.reasoning_parser:
            raise ConfigError("reasoning_config requires --reasoning-parser. Add it")
        if self.batch_dir is not None:
            _check_folder("--batch-dir", Path(self.batch_dir).expanduser())
        if self.sample is not None and not self.sample.strip():
            raise ConfigError("--sample is empty: give a question, or leave it out")
        if self.open and self.disable_page:
            raise ConfigError("--open and --disable-page contradict each other: leave one of them out")
        if self.open and self.uds is not None:
            raise ConfigError("--open requires an address for the browser, and --uds has none: leave one of them out")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with a slash, such as /llm; got {self.root_path!r}")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials requires origins by name: with * any web page could use a visitor's session")

    @classmethod
    def from_kwargs(cls, **values: object) -> "ServerArgs":
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name in SERVER_REFUSED:
                refuse(name, value, SERVER_REFUSED)
            elif name in SERVER_HINTS:
                take_hint(name, value, SERVER_HINTS)
            elif name not in known:
                raise ConfigError(f"unknown server argument {name!r}{nearest(name, [*known, *SERVER_HINTS, *SERVER_REFUSED])}")
        return cls(**{name: value for name, value in values.items() if name in known})  # type: ignore[arg-type]

    @classmethod
    def take_from(cls, namespace: argparse.Namespace) -> "ServerArgs":
        """Return the server's arguments and remove them from the namespace, which keeps those of engine and command."""
        names = SERVER_NAMES
        given = {name: value for name, value in vars(namespace).items() if name in names}
        for name in given:
            delattr(namespace, name)
        return cls.from_kwargs(**given)


def _check_folder(flag: str, folder: Path) -> None:
    """Raise ConfigError if files cannot be written to the folder, which is created later if it does not exist."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{flag} {folder} is a file. Give a folder")
    parent = next((each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()), folder)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {folder} cannot be written to. Give a folder in which this user may create files")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ServerArgs, "server")
    add_hidden_flags(parser, {name: kind for name, (_, kind) in SERVER_HINTS.items()}, {})
    refused = {name: kind_of(harmless) for name, (_, harmless) in SERVER_REFUSED.items()}
    add_hidden_flags(parser, refused, {})


SERVER_NAMES = frozenset(field.name for field in dataclasses.fields(ServerArgs)) | {*SERVER_HINTS, *SERVER_REFUSED}
