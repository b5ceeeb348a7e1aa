import json

import pytest
from front_desk import Desk

from quire.config.server_args import ServerArgs
from quire.serve.auth import Keys, check_exposure, find_keys
from quire.serve.http import find_addresses, reachable
from quire.types.errors import ConfigError


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_keys_everybody_may_ask() -> None:
    desk = Desk()
    assert desk.ask("/v1/whoami").json() == {"tenant": "nobody set it"}
    assert desk.ask("/metrics").status_code == 200


GUARDED = [
    "/v1/whoami",
    "/openapi.json",
    "/metrics",
    "/version",
    "/load",
    "/server_info",
    "/tokenizer_info",
    "/nothing",
    "/",
]
OPEN = ["/livez", "/readyz", "/health", "/ping"]


@pytest.mark.parametrize("path", GUARDED)
def test_every_route_but_those_of_health_needs_the_key(path: str) -> None:
    desk = Desk(api_key=["secret"])
    refused = desk.ask(path)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == 401
    assert refused.json()["error"]["type"] == "AuthenticationError"
    there = ("/v1/whoami", "/metrics", "/version", "/")
    assert desk.ask(path, headers=bearer("secret")).status_code == (200 if path in there else 404)


@pytest.mark.parametrize("path", OPEN)
def test_health_is_open_and_tells_nothing(path: str) -> None:
    desk = Desk(api_key=["secret"])
    assert desk.ask(path).status_code == 200
    assert desk.ask(path, headers=bearer("wrong")).status_code == 200
    desk.llm.state = "dead"
    refused = desk.ask(path)
    assert refused.status_code == 503
    assert refused.content in (b"", b'{"status":"unavailable"}')
    if refused.content:
        assert "reason" in desk.ask(path, headers=bearer("secret")).json()


def test_metrics_are_open_if_that_was_said() -> None:
    desk = Desk(api_key=["secret"], metrics_without_key=True)
    assert desk.ask("/metrics").status_code == 200
    assert [desk.ask(path).status_code for path in ("/metrics/", "/metrics%0a", "/v1/whoami", "/version")] == [401] * 4


def test_anthropics_header() -> None:
    desk = Desk(api_key=["secret"])
    assert desk.ask("/v1/whoami", headers={"X-Api-Key": "secret"}).status_code == 200
    assert desk.ask("/v1/whoami", headers={"X-Api-Key": "wrong"}).status_code == 401
    assert desk.ask("/v1/whoami", headers={"X-Api-Key": "a proxy's", **bearer("secret")}).status_code == 200
    assert desk.ask("/v1/whoami", headers={"X-Api-Key": "secret", **bearer("wrong")}).status_code == 401
    refused = desk.ask("/v1/messages", headers={"X-Api-Key": "wrong"}).json()
    assert refused["type"] == "error" and refused["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/livez/", "GET"),
        ("/livez/../v1/whoami", "GET"),
        ("//livez", "GET"),
        ("/v1/livez", "GET"),
        ("/LIVEZ", "GET"),
        ("/livez%2f..%2fv1%2fwhoami", "GET"),
        ("/livez", "POST"),
        ("/livez%0a", "GET"),
        ("/health%0a", "GET"),
        ("/ping%0d%0a", "POST"),
        ("/livez%00", "GET"),
        ("/livez%20", "GET"),
        ("/%6civez%2f", "GET"),
        ("/%2e/livez", "GET"),
        ("/livez;a", "GET"),
        ("/v1/whoami%0a/livez%0a", "GET"),
        ("/v1/whoami?/livez", "GET"),
        ("/v1/whoami", "OPTIONS"),
    ],
)
def test_only_the_route_itself_is_public(path: str, method: str) -> None:
    assert Desk(api_key=["secret"]).ask(path, method).status_code == 401


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/version", "/v1/whoami"])
@pytest.mark.parametrize("after", ["%0a", "%0d%0a", "%00", "%7f"])
def test_a_path_with_a_line_end_is_no_path(path: str, after: str) -> None:
    """The patterns of routes overlook one."""
    for desk, headers in ((Desk(), {}), (Desk(api_key=["secret"]), bearer("secret"))):
        assert desk.ask(path, headers=headers).status_code == 200
        refused = desk.ask(path + after, headers=headers)
        assert refused.status_code == 404 and refused.json()["error"]["code"] == 404


def test_an_escaped_letter_is_that_letter() -> None:
    assert Desk(api_key=["secret"]).ask("/%6civez").status_code == 200


def test_a_root_path_does_not_open_anything() -> None:
    desk = Desk(api_key=["secret"], root_path="/llm")
    assert desk.ask("/llm/livez").status_code == 200
    assert desk.ask("/llm/v1/whoami").status_code == 401
    assert desk.ask("/livez/llm/v1/whoami").status_code == 401
    assert desk.ask("/llm/v1/whoami", headers=bearer("secret")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(""),
        bearer("secre"),
        bearer("secrets"),
        bearer("Secret"),
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer"},
        [("Authorization", "Bearer secret"), ("Authorization", "Bearer wrong")],
        [(b"Authorization", "Bearer sécret".encode())],
    ],
)
def test_what_is_not_the_key(headers: object) -> None:
    assert Desk(api_key=["secret"]).ask("/v1/whoami", headers=headers).status_code == 401


def test_spellings_of_the_header() -> None:
    desk = Desk(api_key=["sécret"])
    assert desk.ask("/v1/whoami", headers=[(b"authorization", "bearer  sécret ".encode())]).status_code == 200


def test_it_is_guarded_while_it_loads_and_drains() -> None:
    desk = Desk(api_key=["secret"], loaded=False)
    assert desk.ask("/v1/whoami").status_code == 401
    assert desk.ask("/v1/whoami", headers=bearer("secret")).status_code == 503
    desk = Desk(api_key=["secret"])
    desk.state.draining = True
    assert desk.ask("/v1/whoami").status_code == 401
    assert desk.ask("/v1/whoami", headers=bearer("secret")).status_code == 503


def test_tenants() -> None:
    one = Desk(api_key=["a"])
    assert one.ask("/v1/whoami", headers=bearer("a")).json()["tenant"] is None
    tenants = [Desk(api_key=keys).ask("/v1/whoami", headers=bearer("a")).json()["tenant"] for keys in (["a", "b"], ["c", "a"])]
    assert tenants[0] == tenants[1]
    assert len(tenants[0]) == 32
    assert Desk(api_key=["a", "b"]).ask("/v1/whoami", headers=bearer("b")).json()["tenant"] != tenants[0]
    assert Desk(api_key=["a", "a"]).ask("/v1/whoami", headers=bearer("a")).json()["tenant"] is None


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where in the list a key is, or that it is there at all, must not change the work."""
    import hmac

    calls: list[int] = []
    real = hmac.compare_digest

    def counted(left: bytes, right: bytes) -> bool:
        calls.append(len(left))
        return real(left, right)

    monkeypatch.setattr("hmac.compare_digest", counted)
    keys = Keys(["a", "bb", "ccc"])
    for token in (b"a", b"ccc", b"d" * 1000):
        calls.clear()
        keys.find(b"Bearer " + token)
        assert calls == [32, 32, 32]


def test_where_keys_come_from() -> None:
    both = {"QUIRE_API_KEY": "q", "VLLM_API_KEY": "v"}
    assert find_keys(ServerArgs(), both) == ["q"]
    assert find_keys(ServerArgs(), {"VLLM_API_KEY": "v"}) == ["v"]
    assert find_keys(ServerArgs(), {"VLLM_API_KEY": " "}) == []
    assert find_keys(ServerArgs(api_key=["x", "y", "x"]), both) == ["x", "y"]
    assert find_keys(ServerArgs(auth=False), both) == []


@pytest.mark.parametrize(
    ("settings", "open_to_others"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "127.0.0.7"}, False),
        ({"host": "localhost"}, False),
        ({"uds": "/tmp/x"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "10.1.2.3"}, True),
    ],
)
def test_a_server_for_others_needs_a_key(settings: dict[str, str], open_to_others: bool) -> None:
    args = ServerArgs(**settings)  # type: ignore[arg-type]
    assert reachable(find_addresses(args)) is open_to_others
    if open_to_others:
        with pytest.raises(ConfigError, match="--api-key"):
            check_exposure(args, True, [])
    check_exposure(args, open_to_others, ["key"])
    check_exposure(ServerArgs(auth=False, **settings), open_to_others, [])  # type: ignore[arg-type]


def test_errors_tell_nothing_of_the_machine() -> None:
    desk = Desk(api_key=["secret"])
    for answer in (desk.ask("/v1/whoami"), desk.ask("/readyz", "POST", bearer("secret"))):
        text = json.dumps(answer.json())
        assert "secret" not in text
        assert "/" not in text.replace("Authorization: Bearer", "")


def test_preflights_carry_no_key() -> None:
    desk = Desk(api_key=["secret"], allowed_origins=["https://a.example"])
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
    assert desk.ask("/v1/whoami", "OPTIONS", ask).status_code == 200
    refused = desk.ask("/v1/whoami", headers={"Origin": "https://a.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
    assert "access-control-allow-origin" not in Desk().ask("/v1/whoami", headers={"Origin": "https://a.example"}).headers


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST.:80", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "a.localhost", "ours"]
)
def test_loopback_names_are_answered(host: str) -> None:
    assert Desk(loopback=True, host="ours").ask("/v1/whoami", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "128.0.0.1", "[::2]", "", "*"])
def test_other_hosts_are_refused_on_loopback_without_a_key(host: str) -> None:
    """A page that points its own name at 127.0.0.1 would read the answers."""
    for path in ("/v1/whoami", "/", "/livez", "/metrics"):
        refused = Desk(loopback=True).ask(path, headers={"Host": host})
        assert refused.status_code == refused.json()["error"]["code"] == 421
        assert "--allowed-hosts" in refused.json()["error"]["message"]


def test_where_any_host_is_answered() -> None:
    evil = {"Host": "evil.example"}
    assert Desk(loopback=False, auth=False).ask("/v1/whoami", headers=evil).status_code == 200
    assert Desk(loopback=True, api_key=["secret"]).ask("/v1/whoami", headers=evil | bearer("secret")).status_code == 200
    assert Desk(loopback=True, allowed_hosts=["*"]).ask("/v1/whoami", headers=evil).status_code == 200


def test_hosts_may_be_allowed_by_name() -> None:
    allowed = ["llm.example", "*.cluster.example"]
    for loopback, key in ((True, {}), (False, {"auth": False}), (False, {"api_key": ["secret"]})):
        desk = Desk(loopback=loopback, allowed_hosts=allowed, **key)
        statuses = {
            host: desk.ask("/v1/whoami", headers={"Host": host} | bearer("secret")).status_code
            for host in ("LLM.example:80", "a.b.cluster.example", "localhost", "llm.example.evil", "cluster.example", "x")
        }
        assert list(statuses.values()) == [200, 200, 200, 421, 421, 421], statuses
