import pytest

from quire.sched.speeds import Speeds
from tiny_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model: str) -> list:
    """The answers of an engine without tiers."""
    from test_host_tier import plain_turns

    return plain_turns(model)


@pytest.fixture(autouse=True)
def fetching_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured speeds do not decide what is fetched: what is tested does not depend on the load of the machine."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
