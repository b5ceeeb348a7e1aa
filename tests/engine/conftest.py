import pytest
from async_support import Traces
from tiny import make_model, open_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_llm(tiny_model):
    return open_model(tiny_model)


@pytest.fixture
def llm(shared_llm):
    """An engine that must be clean again when the test is over: nothing running, every page in its place."""
    yield shared_llm
    core = shared_llm.llm_engine.core
    assert not shared_llm.llm_engine.has_unfinished_requests()
    core.step()
    core.scheduler.check()
    stats = core.stats
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)


@pytest.fixture
def traces(monkeypatch):
    """The test must leave nothing behind: no directory, no process, no open file, no thread."""
    found = Traces()
    monkeypatch.setattr("tempfile.tempdir", str(found.room))
    yield found
    found.check()
