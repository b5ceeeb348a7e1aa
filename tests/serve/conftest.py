from pathlib import Path

import pytest

from picture_host import picture_host
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
def pictures_port():
    """The port of a web server of pictures."""
    with picture_host(files={"/0.png": (READER / "pictures" / "00.png").read_bytes()}) as port:
        yield port


@pytest.fixture(scope="session")
def reader_server(tmp_path_factory, pictures_port):
    """A server of a trained model that sees. `root`: a directory whose files requests may name."""
    root = tmp_path_factory.mktemp("media")
    (root / "0.png").write_bytes((READER / "pictures" / "00.png").read_bytes())
    (root / "secret.png").symlink_to("/etc/passwd")
    running = Running(
        READER, max_num_batched_tokens=128, allowed_local_media_path=str(root), limit_mm_per_prompt={"image": 4},
        enable_mm_embeds=True,
        kv_cache_memory_bytes=16 << 20, allowed_media_domains=[f"127.0.0.1:{pictures_port}", "localhost"],
        hf_overrides={"text_config": {"max_position_embeddings": 512}},  # the text of a tool call has many tokens
    )  # fmt: skip
    running.root = root
    yield running
    running.close()
