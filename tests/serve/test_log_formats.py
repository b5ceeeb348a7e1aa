"""JSON logs and logging configurations, in every process of a server."""

import json
import logging
import re

import pytest
from server_process import body, serving, wait_for

from quire.proc.logs import JsonLine, apply_config, writes_json
from quire.types.errors import ConfigError

FEW_PAGES = ("--num-gpu-blocks-override", "8")  # the engine process warns


def test_json_in_every_process(serve_model):
    with serving(serve_model, "--log-format", "json", *FEW_PAGES) as server, server.client() as client:
        client.post("/v1/completions", json=body(3, False, "a"))
        client.get("/v1/models")
        engine = server.engine_pid()
        server.signal()
        assert server.wait() == 0
        records = [json.loads(line) for line in server.lines]
    assert {record["process"] for record in records} >= {server.process.pid, engine}
    assert all(record["level"] and record["timestamp"].endswith("Z") and record["message"] for record in records)
    [access] = [record for record in records if record.get("path") == "/v1/models"]
    assert (access["logger"], access["method"], access["status"]) == ("uvicorn.access", "GET", 200)


def test_a_configuration_file(serve_model, tmp_path):
    handlers = {"file": {"class": "logging.FileHandler", "filename": str(tmp_path / "log"), "formatter": "own"}}
    loggers = {name: {"handlers": ["file"], "level": "INFO"} for name in ("vllm", "uvicorn")}
    config = {"version": 1, "formatters": {"own": {"format": "%(process)d|%(name)s|%(message)s"}}, "handlers": handlers}
    (tmp_path / "log.json").write_text(json.dumps(config | {"loggers": loggers}))
    (tmp_path / "text.json").write_text(json.dumps(config | {"loggers": loggers, "handlers": {}}))
    with serving(serve_model, "--log-config-file", str(tmp_path / "text.json")) as server:
        assert server.wait() == 2
        assert re.search(
            r"^quire serve: QUIRE_LOGGING_CONFIG_PATH .*text.json is not a logging configuration: .*\n$", server.log()
        )
    with serving(serve_model, "--log-config-file", str(tmp_path / "log.json"), *FEW_PAGES) as server:
        wait_for(lambda: "ready: serving" in read(tmp_path / "log"))
        engine = server.engine_pid()
        server.signal()
        assert server.wait() == 0 and server.log() == ""
    lines = [line.split("|") for line in read(tmp_path / "log").splitlines()]
    assert {int(line[0]) for line in lines} == {server.process.pid, engine}
    assert {line[1].partition(".")[0] for line in lines} <= {"quire", "uvicorn"}


def read(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory. Give a JSON file for logging.config.dictConfig"),
        ("{", "is not JSON: "),
        ("[]", "is not a logging configuration. Give"),
        ('{"loggers": []}', "is not a logging configuration. Give"),
        ("{}", "is not a logging configuration: "),
        ('{"version": 1, "handlers": {"a": {"class": "no.such"}}}', "Unable to configure handler 'a'"),
    ],
)
def test_wrong_files(monkeypatch, tmp_path, text, message):
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(path))
    with pytest.raises(ConfigError, match=re.escape(message)):
        apply_config()


def test_records_as_json(monkeypatch):
    try:
        raise ValueError("inner")
    except ValueError as error:
        found = logging.LogRecord(
            "quire.x", logging.ERROR, "x.py", 1, "a %s\nb", ("c",), (ValueError, error, error.__traceback__)
        )
    line = JsonLine().format(found)
    assert "\n" not in line
    record = json.loads(line)
    assert (record["message"], record["level"]) == ("a c\nb", "ERROR") and "ValueError: inner" in record["exception"]
    monkeypatch.setenv("QUIRE_LOGGING_FORMAT", "xml")
    with pytest.raises(ConfigError, match="QUIRE_LOGGING_FORMAT must be one of text, json; got 'xml'"):
        writes_json()
