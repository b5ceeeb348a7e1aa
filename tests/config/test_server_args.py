import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from quire.cli.parser import CommandParser
from quire.cli.serve import add_arguments
from quire.config.args import EngineArgs
from quire.config.fields import spec_of
from quire.config.server_args import SERVER_NAMES, ServerArgs
from quire.config.vllm_arguments import REFUSED, SERVER_REFUSED
from quire.types.errors import ConfigError


def from_line(line: str) -> tuple[ServerArgs, EngineArgs]:
    parser = CommandParser(prog="quire serve")
    add_arguments(parser)
    namespace = parser.parse_args(line.split())
    return ServerArgs.take_from(namespace), EngineArgs.from_cli(namespace)


def test_defaults_are_safe() -> None:
    settings, engine = from_line("")
    assert settings == ServerArgs()
    assert engine == EngineArgs()
    assert (settings.host, settings.port, settings.shutdown_timeout, settings.allowed_origins) == ("127.0.0.1", 8000, 30.0, [])
    assert (settings.trust_request_chat_template, settings.auth, settings.metrics_prefix) == (False, True, "quire")


def test_every_field_has_help_and_a_flag() -> None:
    parser = CommandParser(prog="quire serve")
    add_arguments(parser)
    help_text = parser.format_help()
    for field in (*dataclasses.fields(ServerArgs), *dataclasses.fields(EngineArgs)):
        assert spec_of(field).help
        assert f"--{field.name.replace('_', '-')}" in help_text
    for hidden in ("tool-server", "middleware", "decode-context-parallel"):
        assert hidden not in help_text


def test_flags() -> None:
    settings, engine = from_line(
        "MODEL --host ::1 --port 0 --api-key a b --api_key c --no-auth --auth --ssl-keyfile k --ssl-certfile c "
        '--allowed-origins ["https://a","https://b"] --allowed-methods GET POST --shutdown-timeout 2.5 --max-queue 1k '
        "--otlp-traces-endpoint http://x:1 --max-model-len 64 --served-model-name m n --engine-hang-timeout 9"
    )
    assert (settings.host, settings.port, settings.api_key, settings.auth) == ("::1", 0, ["a", "b", "c"], True)
    assert (settings.allowed_origins, settings.allowed_methods) == (["https://a", "https://b"], ["GET", "POST"])
    assert (settings.shutdown_timeout, settings.max_queue, settings.otlp_traces_endpoint) == (2.5, 1000, "http://x:1")
    assert (engine.max_model_len, engine.served_model_name, engine.engine_hang_timeout) == (64, ["m", "n"], 9.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tool-server x", "tools are called by the client"),
        ("--middleware a.b", "the server runs no code but its own"),
        ("--decode-context-parallel-size 2", "decode_context_parallel_size=2"),
        ("--api-key k --no-auth", "contradict"),
        ("--ssl-keyfile k", "ssl_certfile is missing"),
        ("--ssl-ciphers x", "need --ssl-keyfile"),
        ("--enable-log-outputs", "needs --enable-log-requests"),
        ("--root-path llm", "begin with a slash"),
        ("--allowed-origins * --allow-credentials", "origins by name"),
        ("--allowed-origins [1]", "allowed_origins must be a list of strings"),
        ("--allowed-origins [", "not a JSON list"),
        ("--port 70000", "port must be at most 65535"),
        ("--shutdown-timeout -1", "shutdown_timeout must be at least 0"),
    ],
)
def test_what_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_line(line)


def test_what_asks_for_nothing_is_accepted() -> None:
    neutral = {name: harmless[0] if harmless else None for name, (_, harmless) in SERVER_REFUSED.items()}
    assert ServerArgs.from_kwargs(**neutral) == ServerArgs()
    assert from_line("--api-server-count 1 -tp 1")[0] == ServerArgs()


def test_hints_are_taken_and_told(caplog: pytest.LogCaptureFixture) -> None:
    settings, _ = from_line("-asc 1 --disable-log-requests --disable-frontend-multiprocessing MODEL")
    assert settings == ServerArgs()
    assert all(
        f"{name} has no effect" in caplog.text
        for name in ("disable_frontend_multiprocessing=True", "disable_log_requests=True")
    )


def test_a_file_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("model: small\nport: 9\napi-key: [a, b]\nallowed-origins: [https://a]\nmax-model-len: 64\nauth: true\n")
    parser = CommandParser(prog="quire serve")
    add_arguments(parser)
    for line, model, tag, keys in (
        (f"--config {file}", "small", None, ["a", "b"]),
        (f"other --config {file} --api-key c", None, "other", ["c"]),
        (f"--config {file} --model third", "third", None, ["a", "b"]),
    ):
        namespace = parser.parse_args(line.split())
        assert (vars(namespace).get("model"), namespace.model_tag, namespace.api_key) == (model, tag, keys)
        assert (namespace.port, namespace.allowed_origins, namespace.max_model_len) == (9, ["https://a"], 64)


def test_names_belong_to_one_list() -> None:
    server = {field.name for field in dataclasses.fields(ServerArgs)}
    engine = {field.name for field in dataclasses.fields(EngineArgs)}
    assert not server & engine
    assert not server & set(SERVER_REFUSED)
    assert not engine & SERVER_NAMES
    without_a_server = {
        "otlp_traces_endpoint", "enable_log_requests", "reasoning_parser", "reasoning_parser_plugin", "lora_modules",
    }  # fmt: skip
    assert set(REFUSED) & SERVER_NAMES == without_a_server


def test_only_the_servers_part_is_taken() -> None:
    namespace = argparse.Namespace(port=1, model="m", run=print)
    assert ServerArgs.take_from(namespace).port == 1
    assert vars(namespace) == {"model": "m", "run": print}


def test_unknown_names_and_bad_keys() -> None:
    with pytest.raises(ConfigError, match="unknown server argument 'prot'; did you mean port"):
        ServerArgs.from_kwargs(prot=1)
    with pytest.raises(ConfigError, match="an API key is empty"):
        ServerArgs(api_key=["a", " "])
    ServerArgs().allowed_methods.append("x")
    assert ServerArgs().allowed_methods == ["*"]
