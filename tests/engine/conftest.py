import pytest
from async_support import Crew, Traces, collect, until
from tiny import make_model, open_model

from quire import SamplingParams


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
    core.scheduler.roster.check()
    stats = core.stats
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)


@pytest.fixture
def traces(monkeypatch):
    """The test must leave nothing behind: no directory, no process, no open file, no thread."""
    found = Traces()
    monkeypatch.setattr("tempfile.tempdir", str(found.room))
    yield found
    found.check()


@pytest.fixture(scope="module")
def shared_crew(tiny_model, quick):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("QUIRE_FAKE_LATENCY", "0.002")
        crew = Crew(tiny_model)
        crew(crew.llm.wait_ready())
    yield crew
    crew.llm.shutdown()
    crew.runner.close()


@pytest.fixture
def crew(shared_crew):
    """Nothing may be open after the test, here or in the engine, and all pages must be back."""
    yield shared_crew
    llm = shared_crew.llm

    async def settle():
        await collect(llm, [1, 2], SamplingParams(max_tokens=1), "last")
        await until(lambda: llm.stats and llm.stats.running == llm.stats.waiting == 0)
        assert llm.stats.free_pages == llm.stats.pages == llm.pages
        assert (llm.num_open, llm._client.num_open, llm._streams) == (0, 0, {})

    shared_crew(settle())
