"""What may come to the place where nodes bring engines, beside good nodes: another model, garbage, closed connections."""

import shutil
import socket

import pytest

from patience import PATIENCE
from quire import EngineArgs
from quire.engine.agreement import difference, own_terms, terms_of
from quire.engine.handshake import connect, heard, say
from quire.engine.outpost import Outpost
from quire.engine.remote import Harbour
from quire.types.errors import EngineError

HELLO = {"key": "", "engine": 1, "clock": 0.5}


@pytest.fixture(scope="module")
def terms(tiny_model):
    return terms_of(EngineArgs(str(tiny_model)))


@pytest.fixture
def harbour(terms):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    harbour = Harbour(("127.0.0.1", port), range(1, 3), terms)
    yield harbour
    harbour.close()


def come(harbour, **said):
    connection = connect(harbour.address, 0.0)
    say(connection, said)
    return connection, heard(connection, PATIENCE)


def changed(model, directory, file, change):
    """A copy, with one file that is another."""
    copy = directory / "copy"
    shutil.copytree(model, copy)
    (copy / file).write_bytes(change((copy / file).read_bytes()))
    return copy


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "config.json",
            lambda text: text.replace(b"1e-06", b"1e-05"),
            "its model is not machine 0's: 'config.json' is",
        ),
        (
            "model.safetensors",
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            "its model is not machine 0's: 'weights' is another one",
        ),
    ],
)
def test_a_node_with_another_model_is_refused(tiny_model, tmp_path, harbour, caplog, file, change, message):
    other = changed(tiny_model, tmp_path, file, change)
    args = EngineArgs(str(other), data_parallel_size=3, data_parallel_rpc_port=harbour.address[1])
    with pytest.raises(EngineError, match=f"machine 0 refused this one: {message}"):
        Outpost(args, 1, 2).run()
    assert message in caplog.text
    good, told = come(harbour, **HELLO, **own_terms(EngineArgs(str(tiny_model))))
    with good:
        assert told == {"engine": 1}, "another one may come"


def test_what_must_agree(tiny_model, terms):
    def refusal(**given):
        return difference(terms, own_terms(EngineArgs(str(tiny_model), **given)))

    assert refusal() is None
    assert refusal(dtype="half") == "its dtype is 'float16', machine 0's is 'auto'; leave it out there"
    assert refusal(max_model_len=64) == "its max_model_len is 64, machine 0's is None; leave it out there"
    assert refusal(load_format="dummy") == "its model is not machine 0's: 'weights' is missing"
    assert difference(terms, {**terms, "version": "\ud800" * 9999}).startswith("its Quire is '\\ud800")
    assert difference(terms, {**terms, "files": []}) == "its model is not machine 0's: 'config.json' is missing"
    dummy = EngineArgs(str(tiny_model), load_format="dummy", dtype="float16")
    assert difference(terms_of(dummy), own_terms(EngineArgs(str(tiny_model)))) is None, "nobody reads the weights"
    assert difference(terms_of(dummy), own_terms(EngineArgs(str(tiny_model), dtype="half"))) is None
