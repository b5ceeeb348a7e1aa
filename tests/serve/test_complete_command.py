"""`quire complete` with a running server and with a model in this process."""

import io
from pathlib import Path

import pytest

from quire.cli.main import main

PROMPT = "the quick brown fox"
GREEDY = ("--temperature", "0", "--max-tokens", "6")


def url_of(server) -> str:
    return str(server.http.base_url).rstrip("/")


def said(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    code = main(line)
    out, err = capsys.readouterr()
    return code, out, err


def test_server_and_model_complete_alike(server, serve_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, by_server, err = said(capsys, "complete", "--url", f"{url_of(server)}/v1", "-q", PROMPT, *GREEDY)
    assert (code, err) == (0, "") and len(by_server) > 1
    code, by_model, _ = said(capsys, "complete", str(serve_model), "-q", PROMPT, *GREEDY)
    assert (code, by_model) == (0, by_server)
    address = url_of(server).removeprefix("http://")  # host and port alone
    assert said(capsys, "complete", "--url", address, "-q", PROMPT, *GREEDY)[:2] == (0, by_server)


def test_every_line_of_input_is_a_text(server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n\na page is a page\n"))
    code, out, _ = said(capsys, "complete", "--url", f"{url_of(server)}/v1", *GREEDY)
    assert code == 0
    one = said(capsys, "complete", "--url", f"{url_of(server)}/v1", PROMPT, *GREEDY)[1]
    two = said(capsys, "complete", "--url", f"{url_of(server)}/v1", "a page is a page", *GREEDY)[1]
    assert out == one + two


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (["--url", "{url}/v1", "--model-name", "other"], 2, "refused the request with 404"),
        (["--url", "{url}/api/v1"], 2, "refused the request with 404"),
        (["--url", "ftp://x"], 2, "--url must be the address of a server's API"),
        (["--url", "http://127.0.0.1:9/v1"], 1, "does not answer: Connection refused. Start a server with `quire serve MODEL`"),
        (["--url", "{url}/v1", "--dtype", "float32"], 2, "--dtype is for a model in this process"),
        (["--model", "smollm2", "--url", "{url}/v1"], 2, "--url is for a running server"),
        (["--url", "{url}/v1", "--temperature", "-1"], 2, "temperature"),
        (["another text"], 2, "one prompt at a time"),
    ],
)
def test_mistakes_are_one_line(line: list[str], code: int, told: str, server, capsys: pytest.CaptureFixture[str]) -> None:
    got, _, err = said(capsys, "complete", "-q", PROMPT, *(word.format(url=url_of(server)) for word in line))
    assert got == code and told in err and err.count("\n") == 1
