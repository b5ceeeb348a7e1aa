"""A tokenizer whose regular expression backtracks: texts that it gives up on are their client's 400, and no text is tokenized
on the event loop."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.types.errors import RequestError
from serving import Running, error_of

SPLIT = {"type": "Split", "pattern": {"Regex": r"(x+x+)+y|\w+|\s+"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ENDLESS = "x" * 50
GAVE_UP = "the model's tokenizer cannot tokenize the text"


@pytest.fixture(scope="module")
def model(serve_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = Path(shutil.copytree(serve_model, tmp_path_factory.mktemp("backtracking") / "model"))
    path = directory / "tokenizer.json"
    stages = {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": stages}))
    return directory


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Running]:
    running = Running(model, distributed_executor_backend="fake")
    yield running
    running.close()


REQUESTS: dict[str, Any] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/tokenize": lambda text: {"prompt": text},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_text_that_is_given_up_is_a_400(running: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[str] = []
    tokenizer = running.llm.get_tokenizer()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, *rest: here.append(text) or encode(text, *rest))
    assert running.http.post(path, json=REQUESTS[path]("the quick brown fox")).status_code == 200
    error = error_of(running.http.post(path, json=REQUESTS[path](ENDLESS)))
    assert error["code"] == 400 and GAVE_UP in error["message"], error
    assert not here  # another process did it


def test_offline_it_is_a_request_error(model: Path) -> None:
    llm = LLM(str(model), device="cpu", kv_cache_memory_bytes=1 << 20)
    params = SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(RequestError, match=GAVE_UP):
        llm.generate(ENDLESS, params, use_tqdm=False)
    assert llm.generate("the quick brown fox", params, use_tqdm=False)[0].finished
