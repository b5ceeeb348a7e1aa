"""What a server tells about itself."""

import base64
import hashlib
import json
import re
import urllib.parse

import pytest
from front_desk import Desk

from quire.config.server_args import ServerArgs
from quire.serve.about import MAX_BYTES

BROWSER = {"Accept": "text/html,application/xhtml+xml"}
ROUTES = ["/", "/livez", "/readyz", "/health", "/ping", "/version", "/metrics", "/v1/whoami", "/nothing", "/livez%0a"]


def test_the_page_for_browsers() -> None:
    page = Desk().ask("/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert len(page.content) <= MAX_BYTES == 110_000
    assert page.content == Desk(loaded=False).ask("/", headers=BROWSER).content  # it asks for all it shows
    assert Desk(disable_page=True).ask("/", headers=BROWSER).status_code == 404


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages_allow_their_own_scripts_and_nothing_from_elsewhere(path: str) -> None:
    page = Desk().ask(path, headers=BROWSER)
    addresses = set(re.findall(r"https?://[\w.]+", page.text))
    assert addresses == {"http://www.w3.org"}  # the name of SVG, which nobody fetches
    assert not re.search(r"src=|\burl\(|@import|href=\"(?!#|data:image/svg)", page.text)
    assert "innerHTML" not in page.text and "eval(" not in page.text and " style=" not in page.text
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    for kind in ("script", "style"):
        parts = re.findall(rf"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        assert parts and policy[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    assert policy["connect-src"] == "'self'"


def test_the_page_is_open_and_what_it_shows_is_not() -> None:
    desk = Desk(api_key=["secret"])
    page = desk.ask("/", headers=BROWSER)
    assert page.status_code == 200 and "tiny" not in page.text and "secret" not in page.text
    assert desk.ask("/").status_code == 401  # the few lines for everything else name the model
    assert desk.ask("/v1/whoami", headers=BROWSER).status_code == 401


def test_the_api_reference_is_a_page_of_its_own() -> None:
    desk = Desk(api_key=["secret"])
    for path in ("/docs", "/redoc"):
        page = desk.ask(path)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html") and "tiny" not in page.text
        assert len(page.content) < 40_000 and "cdn" not in page.text
        assert Desk(disable_fastapi_docs=True).ask(path).status_code == 404
        assert Desk(loaded=False).ask(path).status_code == 200
    assert desk.ask("/openapi.json").status_code == 401


def test_the_favicon() -> None:
    icon = Desk(api_key=["secret"]).ask("/favicon.ico")
    assert icon.status_code == 200 and icon.headers["content-type"] == "image/svg+xml" and icon.text.startswith("<svg")
    link = re.search(r'<link rel="icon" href="data:image/svg\+xml,([^"]+)">', Desk().ask("/", headers=BROWSER).text)
    assert link and urllib.parse.unquote(link[1]) == icon.text


def test_the_page_for_everything_else() -> None:
    page = Desk().ask("/")
    assert page.headers["content-type"].startswith("text/plain") and page.text.startswith("Quire: tiny\n")
    assert "-d '{" in page.text
    assert "loading" in Desk(loaded=False).ask("/").text
    assert "/docs" not in Desk(disable_fastapi_docs=True).ask("/").text
    assert "/llm/metrics" in Desk(root_path="/llm").ask("/llm/").text
    assert "Authorization" not in page.text
    keyed = Desk(api_key=["secret"]).ask("/", headers={"Authorization": "Bearer secret"}).text
    assert '-H "Authorization: Bearer $QUIRE_API_KEY" ' in keyed and "secret" not in keyed
    wrong = Desk().ask("/", "POST")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "MethodNotAllowedError")
    assert wrong.json()["error"]["message"].endswith("there is GET")
    assert Desk(disable_page=True).ask("/").status_code == 404


def test_a_model_without_a_chat_template_is_shown_with_a_prompt() -> None:
    desk = Desk()
    desk.llm.tokenizer.chat_template = None
    page = desk.ask("/").text
    assert "curl http://here/v1/completions" in page and '"prompt"' in page and "messages" not in page


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("keys", [None, ["secret"]])
def test_every_answer_has_a_request_id(path: str, keys: list[str] | None) -> None:
    desk = Desk(api_key=keys)
    assert desk.ask(path, headers={"X-Request-Id": "mine-1"}).headers.get_list("x-request-id") == ["mine-1"]
    assert re.fullmatch("[0-9a-f]{32}", desk.ask(path).headers["x-request-id"])
    assert "x-request-id" not in Desk(enable_request_id_headers=False, api_key=keys).ask(path).headers


@pytest.mark.parametrize("given", [b"", b"a b", b"\xe9", b"x" * 257, b"a\tb", b"a\r\nSet-Cookie: b", b"a\x00"])
def test_ids_that_are_not_sane_are_not_echoed(given: bytes) -> None:
    answer = Desk().ask("/v1/whoami", headers=[(b"X-Request-Id", given)])
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]) and "set-cookie" not in answer.headers


def test_load() -> None:
    assert Desk().ask("/load").status_code == 404
    desk = Desk(enable_server_load_tracking=True)
    assert desk.ask("/load").json() == {"server_load": 0}
    desk.state.enter()
    assert desk.ask("/load").json() == {"server_load": 1}


def test_server_info(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Desk().ask("/server_info").status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    assert Desk().ask("/server_info").status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "very secret")
    desk = Desk(api_key=["very secret"])
    assert desk.ask("/server_info").status_code == 401
    told = desk.ask("/server_info?config_format=json", headers={"Authorization": "Bearer very secret"})
    assert told.json()["vllm_config"]["server"]["port"] == ServerArgs().port
    assert told.json()["vllm_env"]["VLLM_SERVER_DEV_MODE"] == "1" and "python" in told.json()["system_env"]
    text = desk.ask("/server_info", headers={"Authorization": "Bearer very secret"})
    assert json.loads(text.json()["vllm_config"])["server"]["port"] == ServerArgs().port
    assert "very secret" not in told.text + text.text
    assert desk.ask("/server_info?config_format=xml", headers={"Authorization": "Bearer very secret"}).status_code == 400
    assert Desk(loaded=False).ask("/server_info").status_code == 503
