import pytest

from serving import Running
from tiny_model import make_model


@pytest.fixture(scope="session")
def serve_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def shared_server(serve_model):
    running = Running(serve_model)
    yield running
    running.close()


@pytest.fixture
def server(shared_server):
    """A server that must be clean again when the test is over: nothing open, every page in its place."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def http(server):
    return server.http
