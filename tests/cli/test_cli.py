import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quire
from gguf_files import tiny_llama
from quire.cli.main import COMMANDS, main
from quire.cli.memory_plan import make_plan
from quire.cli.parser import with_dashes
from quire.cli.plan import read_size, render
from quire.config.args import EngineArgs
from quire.types.errors import ConfigError, EngineError

GIB = 2**30
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def in_fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("line", [["--help"], ["plan", "--help"], ["models"]])
def test_help_and_lists_do_not_import_torch(line: list[str], tmp_path: Path) -> None:
    code = f"""
import os, sys
os.environ["QUIRE_CACHE"] = {str(tmp_path)!r}
from quire.cli.main import main
try:
    main({line!r})
except SystemExit:
    pass
print("torch" in sys.modules, "transformers" in sys.modules, "huggingface_hub" in sys.modules)
"""
    out = in_fresh_python(code)
    assert out.endswith("False False False\n")
    assert len(out) > 300


def test_the_version_costs_nothing() -> None:
    out = in_fresh_python("import sys; from quire.cli.main import main; code = main(['--version']); print(code, *sys.modules)")
    version, (code, *modules) = out.splitlines()[0], out.splitlines()[1].split()
    assert (version, code) == (quire.__version__, "0")
    assert not {"numpy", "msgspec", "jinja2", "quire.cli.parser", "quire.config.args"} & {*modules} and len(modules) < 150


def test_a_command_imports_no_other_command() -> None:
    out = in_fresh_python("import sys; from quire.cli.main import make_parser; make_parser(['models']); print(*sys.modules)")
    assert "quire.cli.models" in out and "quire.cli.serve" not in out and "numpy" not in out.split()


def test_serving_a_missing_model_starts_no_engine_and_no_server() -> None:
    code = """
import sys
from quire.cli.main import main
code = main(["serve", "./nonexistent"])
print(code, *(name for name in ("torch", "fastapi", "quire.engine.child", "quire.serve.launch") if name in sys.modules))
"""
    assert in_fresh_python(code) == "1\n"


def test_an_unknown_architecture_does_not_import_transformers(tmp_path: Path) -> None:
    config = {"architectures": ["NovelForCausalLM"], "model_type": "novel", "hidden_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 1, "vocab_size": 10}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = f"""
import sys
from quire import LLM
from quire.types.errors import ModelError
try:
    LLM({str(tmp_path)!r}, device="cpu", load_format="dummy", skip_tokenizer_init=True)
except ModelError as error:
    print("does not know the model_type 'novel'" in str(error), "transformers" in sys.modules)
"""
    assert in_fresh_python(code) == "True False\n"


def test_plan_does_not_import_torch(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    out = in_fresh_python(
        f"import sys; from quire.cli.main import main; main(['plan', {str(path)!r}]); print('torch' in sys.modules)"
    )
    assert out.endswith("False\n")
    assert "LlamaForCausalLM" in out


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == quire.__version__


@pytest.mark.parametrize(("name", "reason"), [("a" * 5000, "File name too long"), ("~nobody-of-this-name/x", "home directory")])
def test_a_model_that_no_path_can_name_is_refused_in_one_line(
    name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", name]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quire serve: {name[:100]}") and reason in error and error.count("\n") == 1 and len(error) < 250


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "./nothing"]) == 1
    assert capsys.readouterr().err == "quire plan: ./nothing: no such file or directory\n"
    assert main(["plan", "--decode-context-parallel-size", "4"]) == 2
    assert capsys.readouterr().err.startswith("quire plan: decode_context_parallel_size=4 is not supported")
    with pytest.raises(SystemExit):
        main(["plan", "--max-modle-len", "4"])
    assert capsys.readouterr().err.count("\n") == 1


def test_other_endings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(error: BaseException) -> Any:
        def run(_: object) -> int:
            raise error

        return run

    for error, code in ((KeyboardInterrupt(), 130), (EngineError("died"), 1), (ConfigError("bad"), 2)):
        monkeypatch.setattr("quire.cli.models.run", failing(error))
        assert main(["models"]) == code
    assert "quire models: died" in capsys.readouterr().err
    monkeypatch.setattr("quire.cli.models.add_parser", failing(KeyboardInterrupt()))  # during imports
    assert main(["models"]) == 130


def test_underscores_are_dashes_in_flags_only() -> None:
    line = ["--max_model_len=a_b", "x_y", "--a_b", "--", "--c_d"]
    assert with_dashes(line) == ["--max-model-len=a_b", "x_y", "--a-b", "--", "--c_d"]


def test_models_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "LlamaForCausalLM" in found["architectures"]
    assert "LlavaForConditionalGeneration" in found["text_of"] and "Llama4ForConditionalGeneration" in found["text_of"]
    assert "LlavaForConditionalGeneration" in found["images_of"] and "Llama4ForConditionalGeneration" not in found["images_of"]
    assert found["default"] == "smollm2"
    assert found["aliases"]["smollm2"]["cached"] is None
    assert "Q4_K" in found["gguf_types"]
    assert main(["models"]) == 0
    assert "fetched on first use" in capsys.readouterr().out


def test_plan_of_a_gpu(model: str) -> None:
    plan = make_plan(EngineArgs(model=model, max_model_len=8192), 80 * GIB)
    assert (plan.device, plan.dtype, plan.fits) == ("cuda", "bfloat16", True)
    assert plan.weights_loaded == 2 * plan.parameters
    assert plan.bytes_per_token == {"full attention": 2 * 2 * 8 * 128 * 32}
    assert plan.bytes_per_page == 16 * 131072
    left = int(80 * GIB * 0.92) - plan.weights_loaded - plan.activations - plan.reserved - plan.graphs
    assert plan.cache == left
    assert plan.pages == left // plan.bytes_per_page - 1
    assert plan.concurrency[8192] == plan.pages / 512
    assert plan.advice == ()


def test_plan_with_too_little_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--memory", "12GiB"]) == 1
    out = capsys.readouterr().out
    assert "Does not fit" in out
    assert "are missing before any cache" in out
    assert "--quantization fp8 halves the weights" in out and "--kv-cache-dtype" not in out and "as stored" not in out
    assert main(["plan", model, "--memory", "12GiB", "--quantization", "fp8"]) == 0
    assert "in fp8, the rest bfloat16\n" in capsys.readouterr().out


def test_plan_of_a_card(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for flags in (["--card", "H100"], ["--memory", "80GiB"]):
        assert main(["plan", model, *flags]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    for flags, why in (
        (["--card", "h100", "--memory", "1GiB"], "--card is a GPU and its memory; drop it, or --memory"),
        (["--card", "h100", "--device", "cpu"], "--card is a GPU and its memory; drop it, or --device cpu"),
        (["--card", "h1000"], "--card 'h1000' is unknown; there are a10"),
    ):
        assert main(["plan", model, *flags]) == 2
        assert why in capsys.readouterr().err


def test_plan_that_shrinks(model: str) -> None:
    plan = make_plan(EngineArgs(model=model), 24 * GIB)
    assert plan.fits
    assert 0 < plan.max_model_len < plan.positions == 131072
    assert "the context is cut from 131072" in plan.advice[0]
    assert plan.concurrency[plan.max_model_len] >= 1


def test_plan_with_a_length_that_does_not_fit(model: str) -> None:
    plan = make_plan(EngineArgs(model=model, max_model_len=131072), 24 * GIB)
    assert not plan.fits
    assert "max_model_len 131072 needs" in plan.advice[0]


def test_plan_of_windows(tmp_path: Path) -> None:
    gemma = {
        **LLAMA_8B,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 128,
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    plan = make_plan(EngineArgs(model=str(tmp_path), max_model_len=65536, max_num_batched_tokens=2048), 80 * GIB)
    assert plan.layers == {"a window of 1024": 16, "full attention": 16}
    full = make_plan(
        EngineArgs(model=str(tmp_path), max_model_len=65536, hf_overrides={"layer_types": ["full_attention"] * 32}), 80 * GIB
    )
    assert plan.concurrency[65536] > 1.8 * full.concurrency[65536]


def test_plan_of_states_and_chunks(tmp_path: Path) -> None:
    hybrid = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [3], "mamba_d_head": 64}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **hybrid}))
    plan = make_plan(EngineArgs(model=str(tmp_path)), 80 * GIB)
    assert plan.states == 31 and plan.snapshots > 0 and plan.bytes_per_state > 0
    assert "in 31 recurrent layers: one for each of" in render(plan)
    alone = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 128}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **alone}))
    assert "there are no keys and values" in render(make_plan(EngineArgs(model=str(tmp_path)), 80 * GIB))
    chunked = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **chunked}))
    assert make_plan(EngineArgs(model=str(tmp_path)), 800 * GIB).layers == {"chunks of 8192": 24, "full attention": 8}


def test_plan_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--gpu_memory=80GiB", "--json", "--max-num-seqs", "7"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["max_seqs"], plan["fits"], plan["memory"]) == (7, True, 80 * GIB)


def test_plan_questions(model: str) -> None:
    assert main(["plan", model, "--device", "cuda"]) == 2
    assert main(["plan", model, "--model", "other"]) == 2


def test_plan_of_a_cpu(tmp_path: Path) -> None:
    plan = make_plan(EngineArgs(model=str(tiny_llama(tmp_path / "m.gguf"))), None)
    assert (plan.device, plan.dtype, plan.parameters_counted) == ("cpu", "float32", True)
    assert plan.cache <= 4 * GIB


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80GiB", 80 * GIB),
        ("24GB", 24 * 10**9),
        ("512MiB", 2**29),
        ("1.5g", 1_500_000_000),
        ("7k", 7000),
        ("2000000", 2_000_000),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert read_size(text) == value


@pytest.mark.parametrize("text", ["10", "24.5"])
def test_a_size_without_a_unit_is_not_a_few_bytes(text: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", model, "--memory", text])
    assert f"{text} would be bytes; use {text}GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [("0GiB", "0GiB is too small; give a size such as 80GiB"), ("9" * 400 + "GiB", "is more than any device has; give a size")],
)
def test_a_size_is_one_of_a_device(text: str, told: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", model, "--memory", text])
    assert left.value.code == 2 and told in capsys.readouterr().err


def test_a_share_that_is_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--memory", "1MiB", "--gpu-memory-utilization", "1e-9"]) == 2
    error = capsys.readouterr().err
    assert error == "quire plan: gpu_memory_utilization 1e-09 leaves nothing of 1,048,576 bytes; raise it\n"


def test_numbers_and_depths_without_an_end(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / "deep.yaml"
    deep.write_text("a: " + "[" * 5000)
    for flags, told in (
        (["--max-model-len", "9" * 400], "is too large a number"),
        (["--hf-overrides", "[" * 50_000], "is not JSON (it is nested too deeply)"),
        (["--config", str(deep)], "is not YAML: "),
    ):
        try:
            code = main(["plan", model, "--card", "l4", *flags])
        except SystemExit as left:
            code = left.code
        assert code == 2 and told in capsys.readouterr().err


def test_the_package_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: quire COMMAND")


def test_a_plan_for_stages(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A page takes what its layers take in the largest stage, and the stages share the memory accordingly."""
    alone = make_plan(EngineArgs(model=model, device="cpu"), 80 * GIB)
    staged = make_plan(EngineArgs(model=model, device="cpu", pipeline_parallel_size=3), 80 * GIB)
    assert (alone.ranks, alone.stages, staged.ranks, staged.stages) == (1, (32,), 3, (10, 11, 11))
    assert staged.bytes_per_page * 32 == alone.bytes_per_page * 11
    assert abs(staged.pages - alone.pages) <= 1
    given = make_plan(EngineArgs(model=model, device="cpu", pipeline_parallel_size=2, kv_cache_memory_bytes=GIB), 80 * GIB)
    assert given.pages == GIB // (alone.bytes_per_page // 2) - 1
    assert main(["plan", model, "--memory", "80GiB", "--device", "cpu", "-pp", "2", "--pipeline-layer-partition", "20,12"]) == 0
    assert "2, of 20, 12 layers" in capsys.readouterr().out


def test_a_plan_for_ranks_on_gpus(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the memory of a GPU for its part of the weights and of each page."""
    alone = make_plan(EngineArgs(model=model), 80 * GIB)
    for args in (EngineArgs(model=model, tensor_parallel_size=4), EngineArgs(model=model, pipeline_parallel_size=4)):
        divided = make_plan(args, 80 * GIB)
        assert divided.weights_held * 4 == divided.weights_loaded == alone.weights_held
        assert bool(divided.collectives) == (divided.stages == (32,))  # stages of one rank have none
        left = [plan.cache + plan.graphs + plan.collectives for plan in (divided, alone)]
        assert left[0] - left[1] == alone.weights_loaded - divided.weights_held
        assert divided.bytes_per_page * 4 == alone.bytes_per_page
        assert divided.pages > 4 * alone.pages
    assert not make_plan(EngineArgs(model=model), 12 * GIB).fits
    assert main(["plan", model, "--memory", "12GiB", "-tp", "4"]) == 0
    told = capsys.readouterr().out
    assert "4 GPUs, each with 12.00 GiB" in told and "1.50 GiB of each GPU for NCCL's buffers and ours" in told
    slow = make_plan(EngineArgs(model=model, tensor_parallel_size=4), 12 * GIB, "pcie4")
    fast = make_plan(EngineArgs(model=model, tensor_parallel_size=4), 12 * GIB)
    assert fast.collectives - slow.collectives == slow.cache - fast.cache > 0
    assert main(["plan", model, "--memory", "24GiB", "-dp", "2"]) == 0
    assert "2 GPUs, each with 24.00 GiB" in capsys.readouterr().out
    assert "GiB on each GPU" in told
    given = EngineArgs(model=model, tensor_parallel_size=4, kv_cache_memory_bytes=60 * GIB)
    assert make_plan(given, 80 * GIB).fits
