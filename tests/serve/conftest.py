from pathlib import Path

import pytest

from serving import Running
from tiny_model import make_model

READER = Path(__file__).parents[1] / "fixtures" / "reader-llava"  # it reads digits


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


@pytest.fixture(scope="session")
def reader_server(tmp_path_factory):
    """A server of a trained model that sees. `root`: a directory whose files requests may name."""
    root = tmp_path_factory.mktemp("media")
    (root / "0.png").write_bytes((READER / "pictures" / "00.png").read_bytes())
    running = Running(
        READER, max_num_batched_tokens=128, allowed_local_media_path=str(root), limit_mm_per_prompt={"image": 4},
        kv_cache_memory_bytes=16 << 20,
        hf_overrides={"text_config": {"max_position_embeddings": 512}},  # the text of a tool call has many tokens
    )  # fmt: skip
    running.root = root
    yield running
    running.close()
