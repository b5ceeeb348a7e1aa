"""One line for every response, whoever gave it; --disable-uvicorn-access-log leaves them out."""

import logging

import pytest
from front_desk import Desk

from quire.config.server_args import ServerArgs
from quire.obs.logs import set_http_levels


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/v1/whoami?a=b", "POST", 200), ("/livez", "GET", 200), ("/v1/nothing", "GET", 404)]
)
def test_every_response_has_a_line(path: str, method: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        assert Desk(allowed_origins=["https://a.example"]).ask(path, method).status_code == status
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert lines == [f'127.0.0.1:123 - "{method} {path} HTTP/1.1" {status}']


def test_answers_of_the_cors_layer_have_one_too(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        Desk(allowed_origins=["https://a.example"]).ask("/v1/whoami", "OPTIONS", headers)
    assert [record.getMessage() for record in caplog.records] == ['127.0.0.1:123 - "OPTIONS /v1/whoami HTTP/1.1" 200']


def test_it_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        assert Desk(disable_uvicorn_access_log=True).ask("/livez").status_code == 200
    assert not caplog.records


@pytest.mark.parametrize(("settings", "logged"), [({}, []), ({"disable_access_log_for_endpoints": ""}, ["/livez", "/metrics"])])
def test_probes_and_scrapes_have_a_line_only_if_asked(
    settings: dict[str, str], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    args = ServerArgs(**settings)
    try:
        set_http_levels("info", access=True, quiet_paths=args.unlogged_paths)
        with caplog.at_level(logging.INFO, "uvicorn.access"):
            for path in ("/livez", "/metrics?x=1", "/v1/whoami"):
                Desk(**settings).ask(path)
    finally:
        set_http_levels("info", access=True)
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert [path for path in ("/livez", "/metrics", "/v1/whoami") if any(f"GET {path}" in line for line in lines)] == [
        *logged,
        "/v1/whoami",
    ]
