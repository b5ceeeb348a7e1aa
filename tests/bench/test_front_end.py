"""The server that `quire bench steps --front-end` starts: it ends with its parent, and what goes wrong is told."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.bench import front_end
from quire.bench.front_end import Requests, measure_front_end
from quire.types.errors import ConfigError, EngineError
from tiny_model import make_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
PARENT = """
import os, sys
from quire.bench import front_end
front_end.ALONE = 10**6
front_end.measure_front_end([sys.executable, "-m", "quire.cli.bench_steps", str(os.getpid()), sys.argv[1]], 128, 512)
"""
DEAF = "import socket, sys, time; it = socket.create_server(('127.0.0.1', int(sys.argv[2]))); time.sleep(600)"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is measured by /proc")


@pytest.mark.parametrize(("ending", "generations"), [(signal.SIGTERM, 1), (signal.SIGKILL, 2)])
def test_the_server_ends_with_its_parent(ending: signal.Signals, generations: int, tmp_path: Path) -> None:
    """And its engine with it, if it has one yet."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    family = [parent.pid]
    try:
        for _ in range(generations):
            family += until(partial(children, family[-1]))
    finally:
        parent.send_signal(ending)
        parent.wait()
    until(lambda: not any(map(alive, family)))


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "told"), [("exit('I cannot')", "did not start: I cannot"), (DEAF, "did not answer within 0.2 s")]
)
def test_a_server_that_does_not_serve(code: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(EngineError, match=told):
        measure_front_end([sys.executable, "-c", code], 128, 512)


def test_requests_are_as_long_as_a_model_has_room() -> None:
    for longest, prompt, tokens in ((384, 256, 64), (256, 128, 64), (100, 50, 25), (4, 2, 1)):
        requests = Requests(longest, 512)
        assert (requests.prompt, requests.tokens) == (prompt, tokens) and prompt + 1 + tokens <= longest
    with pytest.raises(ConfigError, match="needs a model with 4 positions at least, this one has 3"):
        measure_front_end([], 3, 512)
