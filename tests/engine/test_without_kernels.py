"""Where no C compiler was there when Quire was installed, libraries do the work."""

import json
import os
import subprocess
import sys

import gguf
import pytest
from tiny import make_model, open_model

from gguf_files import LLAMA, llama_tensors, tiny_llama
from quire import SamplingParams

PROMPT = [5, 7, 11, 13, 17, 19, 23]
SCRIPT = f"""
import json, sys
from importlib import metadata

sys.modules["quire.ops._native"] = None  # importing it fails
version = metadata.version

def without_openvino(name):
    if name == "openvino":
        raise metadata.PackageNotFoundError(name)
    return version(name)

if sys.argv[2] == "alone":
    metadata.version = without_openvino

from quire import LLM, SamplingParams
from quire.device.cpu.device import has_openvino
from quire.ops.native import kernels

assert kernels() is None and not (sys.argv[2] == "alone" and has_openvino())
llm = LLM(sys.argv[1], device="cpu", kv_cache_memory_bytes=4 << 20, skip_tokenizer_init=True)
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
[output] = llm.generate([{{"prompt_token_ids": {PROMPT}}}], params, use_tqdm=False)
print(json.dumps(list(output.outputs[0].token_ids)))
"""


def ask(model, libraries, cache) -> list[int]:
    environment = {**os.environ, "QUIRE_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), libraries], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("installed without its C kernels") == 1
    tokens: list[int] = json.loads(done.stdout.splitlines()[-1])
    return tokens


def test_a_float32_model(tmp_path):
    model = make_model(tmp_path, hidden_size=64)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    [expected] = open_model(model).generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert ask(model, "installed", tmp_path / "cache") == list(expected.outputs[0].token_ids)


@pytest.mark.parametrize("libraries", ["installed", "alone"])
def test_a_model_in_blocks(tmp_path, libraries):
    kind = gguf.GGMLQuantizationType.Q4_0
    matrices = {name: tensor for name, tensor in llama_tensors(LLAMA).items() if tensor.ndim == 2}
    blocks = {name: (gguf.quants.quantize(tensor, kind), kind) for name, tensor in matrices.items()}
    assert len(ask(tiny_llama(tmp_path / "m.gguf", tensors=blocks), libraries, tmp_path / "cache")) == 6
