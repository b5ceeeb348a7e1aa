"""IO processors of other packages around pooling requests."""

import numpy as np
import pytest

from quire import LLM, PoolingParams
from quire.types.errors import ConfigError, InvalidParameter, PlugInError
from serving import Running, error_of
from tiny_model import make_model

CODE = """
import dataclasses
import numpy as np
from quire.features.pooling.io_processor import IOProcessor
from quire.types.pooling import PoolingParams

@dataclasses.dataclass
class Answer:
    shape: list
    mean: np.ndarray
    query: str

class Mine(IOProcessor):
    def parse_data(self, data):
        if "query" not in data:
            raise ValueError("query is missing")
        return data

    def merge_pooling_params(self, params=None):
        return params or PoolingParams(task="plugin", use_activation=False)

    def pre_process(self, prompt, request_id=None, **kwargs):
        if prompt["query"] == "crash":
            raise RuntimeError("of pre_process")
        if prompt["query"] == "no prompts":
            return []
        if prompt["query"] == "out of vocabulary":
            return {"prompt_token_ids": [5, 10**6]}
        return [prompt["query"], {"prompt_token_ids": [5, 12]}]

    def post_process(self, model_output, request_id=None, *, prompt, **kwargs):
        if prompt["query"] == "no json":
            return {"object": object()}
        values = np.stack([output.outputs.data for output in model_output])
        return Answer(list(values.shape), values.mean(0), prompt["query"])

class Older:  # as programs written for vLLM define it
    pass

def older():
    global Older
    from vllm.config import VllmConfig
    from vllm.outputs import PoolingRequestOutput
    from vllm.plugins.io_processors.interface import IOProcessor as Base

    class Older(Base):
        def __init__(self, vllm_config: VllmConfig):
            super().__init__(vllm_config)
            self.length = vllm_config.model_config.max_model_len

        def parse_request(self, request):
            return request

        def pre_process(self, prompt, request_id=None):
            return prompt

        def post_process(self, model_output, request_id=None):
            return [self.length, len(model_output)]

    return "acme_processors.Older"

class Foreign:
    pass
"""
POINTS = """[quire.io_processors]
mine = acme_processors:Mine
foreign = acme_processors:Foreign
[vllm.io_processor_plugins]
older = acme_processors:older
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def open_llm(packages, model):
    packages.add("acme_processors", POINTS, CODE)
    opened = []

    def start(name, **more):
        options = {"runner": "pooling", "device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20}
        opened.append(LLM(str(model), io_processor_plugin=name, **options | more))
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()


def test_encode_of_data(open_llm):
    llm = open_llm("mine")
    [found] = llm.encode({"data": {"query": "the quick brown fox"}}, use_tqdm=False)
    single = llm.encode(["the quick brown fox", [5, 12]], PoolingParams(use_activation=False), use_tqdm=False)
    assert found.outputs.shape == [2, 32] and found.outputs.query == "the quick brown fox"
    assert np.array_equal(found.outputs.mean, np.stack([one.outputs.data for one in single]).mean(0))
    [activated] = llm.encode(
        {"data": {"query": "fox"}}, PoolingParams(use_activation=True), pooling_task="plugin", use_tqdm=False
    )
    assert np.linalg.norm(activated.outputs.mean) <= 1.0


def test_errors_of_data(open_llm):
    llm = open_llm("mine")
    with pytest.raises(InvalidParameter, match=r"data is not valid for the IO processor 'mine': query is missing"):
        llm.encode({"data": {}})
    with pytest.raises(PlugInError, match=r"the IO processor 'mine' of acme_processors 1.0 .* RuntimeError: of pre_process"):
        llm.encode({"data": {"query": "crash"}})
    with pytest.raises(ConfigError, match=r"pre_process must return a prompt or a list of prompts"):
        llm.encode({"data": {"query": "no prompts"}})
    with pytest.raises(InvalidParameter, match=r"vocabulary"):
        llm.encode({"data": {"query": "out of vocabulary"}})
    [found] = llm.encode({"data": {"query": "the engine goes on"}}, use_tqdm=False)
    assert found.outputs.shape == [2, 32]


def test_a_processor_written_for_vllm(open_llm):
    [found] = open_llm("older").encode({"data": ["the quick", "brown fox"]}, use_tqdm=False)
    assert found.outputs == [256, 2]


def test_what_names_no_processor(open_llm, caplog):
    with pytest.raises(ConfigError, match=r"IO processor of an installed package .foreign, mine, older.; got 'missing'"):
        open_llm("missing")
    with pytest.raises(PlugInError, match=r"the IO processor 'foreign' .* must be a subclass of IOProcessor"):
        open_llm("foreign")
    with pytest.raises(ConfigError, match=r"io_processor_plugin='mine' requires a model that pools"):
        open_llm("mine", runner="generate")
    llm = open_llm(None, hf_overrides={"io_processor_plugin": "absent"})
    assert "config.json names the IO processor 'absent', which is not installed" in caplog.text
    with pytest.raises(InvalidParameter, match=r"data requires an IO processor. Set io_processor_plugin"):
        llm.encode({"data": 1})
    [named] = open_llm(None, hf_overrides={"io_processor_plugin": "mine"}).encode({"data": {"query": "fox"}}, use_tqdm=False)
    assert named.outputs.query == "fox"


BAD = [
    ({"data": {}}, 400, "data is not valid for the IO processor 'mine': query is missing"),
    ({"data": {"query": "out of vocabulary"}}, 400, "vocabulary"),
    ({"data": {"query": "x " * 300}}, 400, "context"),
    ({"data": {"query": "fox"}, "input": "fox"}, 400, "input is not supported with data. Remove it"),
    ({"data": {"query": "fox"}, "task": "classify"}, 400, "task 'classify' is not supported by this model"),
    ({"task": "plugin"}, 400, "task=plugin requires data"),
    ({"data": {"query": "crash"}}, 500, "internal error"),
    ({"data": {"query": "no json"}}, 500, "the engine is not available"),
]


def test_requests_with_data(packages, model):
    """The engine is no fork of the tests' server, which does not see packages that are installed later."""
    packages.add("acme_processors", POINTS, CODE)
    running = Running(model, runner="pooling", io_processor_plugin="mine", quick=False)
    try:
        http = running.http
        answer = http.post("/pooling", json={"model": "tiny", "data": {"query": "the quick brown fox"}}).json()
        vectors = [
            http.post("/pooling", json={"input": one, "use_activation": False}).json()["data"][0]["data"]
            for one in ("the quick brown fox", [5, 12])
        ]
        assert answer["request_id"].startswith("pool-") and answer["data"]["shape"] == [2, 32]
        assert np.allclose(answer["data"]["mean"], np.mean(vectors, 0), atol=1e-6)
        for body, status, message in BAD:
            response = http.post("/pooling", json=body)
            assert (response.status_code, message in error_of(response)["message"]) == (status, True), response.text
        running.wait_idle()
    finally:
        running.close()


def test_data_without_a_processor(model):
    running = Running(model, runner="pooling")
    try:
        response = running.http.post("/pooling", json={"data": {"query": "fox"}})
        assert response.status_code == 400
        assert "data requires a server with an IO processor (--io-processor-plugin)" in error_of(response)["message"]
    finally:
        running.close()
