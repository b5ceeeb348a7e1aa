"""Programs that import vllm, or quire by vLLM's module paths."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest
from tiny import TEXT

import quire
from quire.compat import SITE, VLLM_VERSION, install
from quire.compat.__main__ import main
from quire.compat.table import MAINS, MODULES, NOT_BUILT_MODULES, NOT_BUILT_NAMES

# what vLLM's own examples import, as far as Quire has it
IMPORTS = {
    "": ["EngineArgs", "LLM", "LLMEngine", "PromptType", "RequestOutput", "SamplingParams", "TokensPrompt"],
    "config": ["ModelConfig", "VllmConfig"],
    "distributed": ["cleanup_dist_env_and_memory"],
    "engine.arg_utils": ["AsyncEngineArgs", "EngineArgs"],
    "engine.async_llm_engine": ["AsyncLLMEngine"],
    "entrypoints.chat_utils": ["load_chat_template"],
    "entrypoints.llm": ["LLM"],
    "envs": ["VLLM_USE_V1"],
    "inputs": ["TextPrompt"],
    "logger": ["init_logger"],
    "lora.request": ["LoRARequest"],
    "outputs": ["CompletionOutput", "EmbeddingRequestOutput", "PoolingRequestOutput", "RequestOutput"],
    "platforms": ["current_platform"],
    "pooling_params": ["PoolingParams"],
    "sampling_params": ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"],
    "usage.usage_lib": ["UsageContext"],
    "utils": ["FlexibleArgumentParser", "random_uuid"],
    "utils.argparse_utils": ["FlexibleArgumentParser"],
    "utils.network_utils": ["get_ip", "get_open_port"],
    "utils.system_utils": ["set_ulimit"],
    "v1.engine.async_llm": ["AsyncLLM"],
    "model_executor.models": ["ModelRegistry"],
    "plugins.io_processors.interface": ["IOProcessor"],
    "v1.metrics.reader": ["Counter", "Gauge", "Histogram", "Vector"],
}
NOT_THERE = [
    ("entrypoints.pooling", "PoolingBasicRequestMixin", "quire serve"),
    ("assets.image", "ImageAsset", "as PIL images, arrays or URLs"),
    ("config", "KVTransferConfig", "KV cache transfer"),
    ("distributed.weight_transfer", "ModuleSource", "weight transfer"),
    ("entrypoints.launcher", "serve_http", "quire serve"),
    ("model_executor.model_loader", "ShardedStateLoader", "loaders"),
    ("model_executor.layers.quantization", "register_quantization_config", "vLLM's layers and kernels"),
    ("multimodal.utils", "fetch_image", "as PIL images, arrays or URLs"),
    ("sampling_params", "GuidedDecodingParams", "StructuredOutputsParams"),
    ("v1.sample.sampler", "Sampler", "inside of the engine"),
]


@pytest.fixture
def vllm(monkeypatch):
    """`import vllm` means Quire, in this test only."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    install()
    yield importlib.import_module("vllm")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def imported(root, path, name):
    scope = {}
    exec(f"from {root}{path and '.' + path} import {name}", scope)
    return scope[name]


def test_what_vllms_examples_import_is_there(vllm):
    for path, names in IMPORTS.items():
        for name in names:
            assert imported("vllm", path, name) is imported("quire", path, name)
    assert imported("vllm", "", "LLM") is vllm.LLM is vllm.entrypoints.llm.LLM is quire.LLM


@pytest.mark.parametrize("path, name, feature", NOT_THERE)
def test_what_is_not_built_says_which_feature_it_is(vllm, path, name, feature):
    for root in ("vllm", "quire"):
        with pytest.raises(ImportError, match=f"is not built in Quire: .*{feature}"):
            imported(root, path, name)
    with pytest.raises(ImportError, match=r"vllm\.outputs\.Nothing is not built in Quire"):
        imported("vllm", "outputs", "Nothing")
    with pytest.raises(ImportError, match=r"vllm\.nothing is not built in Quire"):
        importlib.import_module("vllm.nothing.below")
    with pytest.raises(AttributeError, match="EmbedsPrompt is not built in Quire: prompt"):
        _ = vllm.EmbedsPrompt
    assert not hasattr(vllm, "EmbedsPrompt") and not hasattr(vllm, "nothing")
    with pytest.raises(ImportError, match="No module named"):
        importlib.import_module("quire.nothing")


def test_every_row_of_the_table_leads_somewhere():
    for path, names in MODULES.items():
        for name, home in names.items():
            module, _, attribute = home.partition(":")
            assert hasattr(importlib.import_module(module), attribute), (path, name)
        assert path not in NOT_BUILT_MODULES and not set(names) & set(NOT_BUILT_NAMES)
    for home in MAINS.values():
        module, _, attribute = home.partition(":")
        assert hasattr(importlib.import_module(module), attribute), home


def test_programs_find_vllm_and_its_version(vllm):
    assert importlib.metadata.version("vllm") == vllm.__version__ == VLLM_VERSION == imported("vllm", "version", "__version__")
    assert importlib.util.find_spec("vllm").origin.startswith(str(SITE))
    assert "LLM" in dir(vllm) and "RequestOutput" in vllm.outputs.__all__


def test_importing_quire_leaves_vllms_paths_alone():
    code = """
import sys, quire
try:
    import quire_has_no_such_module
except ImportError:
    pass
print([name for name in sys.modules if name.startswith(("quire.", "vllm", "torch"))])
import quire.outputs
print("quire.compat.table" in sys.modules, "torch" in sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told == "[]\nTrue False\n"


def test_another_vllm_is_not_replaced_behind_its_back(monkeypatch):
    other = importlib.util.module_from_spec(importlib.util.spec_from_loader("vllm", None, origin="elsewhere"))
    other.__file__ = "/elsewhere/vllm/__init__.py"
    monkeypatch.setitem(sys.modules, "vllm", other)
    with pytest.raises(ImportError, match="already imported from /elsewhere"):
        install()
    with pytest.raises(ImportError, match="No module named"):
        importlib.import_module("vllm.outputs")


SCRIPT = """
import importlib.metadata, json, subprocess, sys
from vllm import LLM, EngineArgs, SamplingParams
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(model="nobody/nothing", max_model_len=32)
parser.add_argument_group("Sampling").add_argument("--max-tokens", type=int)
args = vars(parser.parse_args())
params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.pop("max_tokens"))
llm = LLM(**args)
outputs = llm.generate(["the quick", "a page"], params, use_tqdm=False)
assert all(isinstance(output, RequestOutput) for output in outputs)
child = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
version = subprocess.run(child, check=True, capture_output=True, text=True).stdout.strip()
print(json.dumps([version, importlib.metadata.version("vllm"), *(output.outputs[0].token_ids for output in outputs)]))
"""


def test_a_script_written_for_vllm_runs_unchanged(llm, tiny_model, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["--model", str(tiny_model), "--max_tokens", "5", "--device", "cpu", "--kv-cache-memory-bytes", "4194304"]
    line = [sys.executable, "-m", "quire.compat", str(tmp_path / "script.py"), *flags]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    params = quire.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)
    expected = [output.outputs[0].token_ids for output in llm.generate(["the quick", "a page"], params, use_tqdm=False)]
    assert json.loads(done.stdout.splitlines()[-1]) == [VLLM_VERSION, VLLM_VERSION, *expected]


def test_what_the_runner_cannot_find(capsys):
    assert main(["no_such_script.py"]) == 2 and "got 'no_such_script.py'" in capsys.readouterr().err
    assert main([]) == 2 and main(["--help"]) == 0


def test_flags_of_a_program_beside_the_engines(vllm):
    parser = vllm.utils.FlexibleArgumentParser()
    assert vllm.EngineArgs.add_cli_args(parser) is parser
    parser.add_argument("--own", type=int, default=3)
    args = parser.parse_args(["--max_model_len", "1k", "--hf-overrides.rope_theta", "5"])
    assert (args.own, args.max_model_len, args.tensor_parallel_size, args.hf_overrides) == (3, 1000, 1, {"rope_theta": 5})
    assert vllm.EngineArgs.from_cli_args(args) == quire.EngineArgs(max_model_len=1000, hf_overrides={"rope_theta": 5})
    known, rest = parser.parse_known_args(["--own", "4", "--stranger", "x"])
    assert isinstance(known, argparse.Namespace) and (known.own, rest) == (4, ["--stranger", "x"])


def test_an_evaluation_harness_scores_and_continues_texts(vllm, llm, tiny_model):
    """The calls that lm-eval's vllm backend makes."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(tiny_model), tokenizer_mode="auto", trust_remote_code=False, revision=None)
    template = resolve_chat_template(
        tokenizer=tokenizer, chat_template=None, tools=None, model_config=llm.llm_engine.model_config
    )
    message = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, chat_template=template)
    assert rendered == "<user>hi</s><assistant>"

    until = [TEXT[2], "never", "neither", "nor this", "nor that"]
    params = SamplingParams(max_tokens=6, stop=until, temperature=0, ignore_eos=True)
    context = tokenizer.encode(TEXT[0])
    [output] = llm.generate([TokensPrompt(prompt_token_ids=context)], sampling_params=[params], use_tqdm=False)
    continuation = output.outputs[0].token_ids

    score = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
    [scored] = llm.generate([TokensPrompt(prompt_token_ids=context + continuation)], sampling_params=[score], use_tqdm=False)
    positions = scored.prompt_logprobs[len(context) :]
    assert scored.prompt_logprobs[0] is None and len(positions) == len(continuation) == 6
    for token, table in zip(continuation, positions, strict=True):
        assert max(table, key=lambda other: table[other].logprob) == token and table[token].rank == 1


def test_small_helpers(vllm, monkeypatch, tmp_path):
    from vllm.entrypoints.chat_utils import load_chat_template
    from vllm.utils.network_utils import get_ip, get_open_port

    assert len({vllm.utils.random_uuid() for _ in range(3)}) == 3 and 0 < get_open_port() < 65536 and get_ip().count(".") == 3
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert load_chat_template(tmp_path / "t.jinja") == load_chat_template("{{ messages }}") == "{{ messages }}"
    assert load_chat_template(None) is None and load_chat_template("plain", is_literal=True) == "plain"
    platform = vllm.platforms.current_platform
    assert platform.is_cuda() != platform.is_cpu() and platform.device_name == platform.device_type
    assert platform.device_count() >= 1 and not platform.is_rocm() and not platform.is_tpu()
    assert platform.has_device_capability(10) == platform.is_cuda()
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "2.5")
    monkeypatch.setenv("VLLM_SOMETHING", "x")
    envs = vllm.envs
    assert (envs.VLLM_LOG_STATS_INTERVAL, envs.VLLM_SOMETHING, envs.VLLM_SERVER_DEV_MODE) == (2.5, "x", False)
    assert not hasattr(envs, "VLLM_NOTHING")
    assert vllm.usage.usage_lib.UsageContext.API_SERVER == "API_SERVER"
    vllm.utils.system_utils.set_ulimit(16)
    vllm.distributed.cleanup_dist_env_and_memory()
