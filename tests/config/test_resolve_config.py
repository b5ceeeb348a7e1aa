import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.conflicts import CONFLICTS
from quire.config.memory import activation_bytes, estimate_parameters, host_cache_bytes
from quire.config.resolve import resolve
from quire.device.registry import describe, open_device
from quire.types.errors import ConfigError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def config_of(model: Path, device: str = "cpu", gib: int | None = None, serving: bool = False, **values: Any) -> Config:
    args = EngineArgs.from_kwargs(model=str(model), load_format="dummy", **values)
    return resolve(args, lambda: device, lambda name: open_device(name).facts(memory=(gib or 0) * 2**30), serving=serving)


def test_on_a_cpu(model: Path) -> None:
    config = config_of(model)
    assert (config.device, config.dtype, config.depth) == ("cpu", "float32", 0)
    assert (config.max_batched_tokens, config.max_seqs) == (1088, 64)
    assert (config.max_model_len, config.max_model_len_explicit) == (4096, False)
    assert (config.page_size, config.chunk_cap, config.chunked, config.prefix_caching, config.policy) == (
        16,
        None,
        True,
        True,
        "fcfs",
    )
    assert config.served_names == (str(model),)


def test_pages_of_quantized_weights_on_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages as OpenVINO attends over, unless the user wants others."""
    monkeypatch.setattr("quire.config.resolve.choose_keep_quantized", lambda *given: True)
    assert config_of(model).page_size == 32
    assert config_of(model, block_size=16).page_size == 16


def test_on_a_gpu(model: Path) -> None:
    config = config_of(model, "cuda")
    assert (config.device, config.dtype, config.depth) == ("cuda", "bfloat16", 1)
    assert (config.max_batched_tokens, config.max_seqs) == (8192, 256)
    assert (config_of(model, "cuda", gib=80).max_batched_tokens, config_of(model, "cuda", gib=80).max_seqs) == (16384, 1024)
    assert config_of(model, "cuda", gib=24).max_seqs == 256


def test_whoever_serves_takes_steps_by_the_load(model: Path) -> None:
    """So that nobody waits long for a token because of others' prompts; what is asked for is taken as it is."""
    assert config_of(model, serving=True).max_batched_tokens == config_of(model).max_batched_tokens
    large = config_of(model, "cuda", gib=80, serving=True)
    assert (large.max_batched_tokens, large.max_seqs, large.steps_follow_load) == (8192, 1024, True)
    asked = config_of(model, "cuda", gib=80, serving=True, max_num_batched_tokens=9000)
    assert (asked.max_batched_tokens, asked.steps_follow_load) == (9000, False)
    assert not config_of(model, "cuda", gib=80).steps_follow_load and config_of(model, serving=True).steps_follow_load
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_local_experts": 8, "num_experts_per_tok": 2}))
    experts = config_of(model, "cuda", gib=80, serving=True)
    assert (experts.max_batched_tokens, experts.steps_follow_load) == (8192, False)
    assert config_of(model, "cuda", gib=80).max_batched_tokens == 16384


def test_an_explicit_device_is_not_looked_for(model: Path) -> None:
    args = EngineArgs(model=str(model), load_format="dummy", device="cpu")
    assert resolve(args, lambda: pytest.fail("asked for the device"), describe).device == "cpu"


@pytest.mark.parametrize(
    ("stored", "asked", "device", "dtype"),
    [
        ("float16", "auto", "cuda", "float16"),
        ("float32", "auto", "cuda", "bfloat16"),
        ("float16", "auto", "cpu", "float32"),
        ("float16", "half", "cpu", "float16"),
        ("float16", "float", "cuda", "float32"),
    ],
)
def test_dtype(model: Path, stored: str, asked: str, device: str, dtype: str) -> None:
    assert config_of(model, device, dtype=asked, hf_overrides={"torch_dtype": stored}).dtype == dtype


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gemma4_text"])
def test_gemma_never_runs_in_float16(model: Path, kind: str) -> None:
    gemma = {"model_type": kind, "torch_dtype": "float16"}
    assert config_of(model, "cuda", hf_overrides=gemma).dtype == "bfloat16"
    with pytest.raises(ConfigError, match=f"{kind} overflows in float16"):
        config_of(model, "cuda", hf_overrides=gemma, dtype="half")


def test_length(model: Path) -> None:
    for length in (-1, "auto", None):
        config = config_of(model, max_model_len=length)
        assert (config.max_model_len, config.max_model_len_explicit) == (4096, False)
    config = config_of(model, max_model_len=100)
    assert (config.max_model_len, config.max_model_len_explicit) == (100, True)
    assert config_of(model, max_model_len=8192, hf_overrides={"max_position_embeddings": 8192}).max_model_len == 8192


def test_open_batch_numbers_yield_to_given_ones(model: Path) -> None:
    assert config_of(model, max_num_batched_tokens=32).max_seqs == 32
    assert config_of(model, max_num_seqs=4096).max_batched_tokens == 4096
    assert config_of(model, max_num_seqs=2, max_model_len=100).max_batched_tokens == 200
    assert config_of(model, enable_chunked_prefill=False).max_batched_tokens == 4096


def test_overlap(model: Path) -> None:
    assert config_of(model, "cuda", async_scheduling=False).depth == 0
    assert config_of(model, "cpu", async_scheduling=True).depth == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 5000}, "longer than the 4096 positions"),
        ({"max_model_len": 1}, "no room for a prompt"),
        ({"max_num_seqs": 10, "max_num_batched_tokens": 9}, "max_num_seqs 10 requires max_num_batched_tokens of at least that"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "whole prompt must fit"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 9}, "needs enable_chunked_prefill"),
        ({"long_prefill_token_threshold": 5000}, "would do nothing"),
        ({"block_size": 24}, "must be a power of two"),
        ({"skip_tokenizer_init": True, "tokenizer": "x"}, "drop one"),
        ({"skip_tokenizer_init": True, "chat_template": "x"}, "drop one"),
        ({"override_generation_config": {"temprature": 1}}, "unknown temprature; known are temperature"),
        ({"override_generation_config": {"temperature": 5}}, "temperature"),
    ],
)
def test_conflicts_say_what_to_change(model: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(model, **values)


def test_conflicts_are_told_together(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)block_size 24.*"):
        config_of(model, block_size=24, max_model_len=5000)
    assert len({conflict.name for conflict in CONFLICTS}) == len(CONFLICTS)


def test_what_is_refused_with_recurrent_layers(model: Path) -> None:
    """Nothing is said of heads that are not there, and what is told to take is taken."""
    mamba = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 4, "head_dim": 32, "n_groups": 1}
    named = {**CONFIG, "num_attention_heads": None, "num_key_value_heads": None}
    (model / "config.json").write_text(json.dumps({**named, **mamba}))
    assert config_of(model, tensor_parallel_size=4).ranks == 4
    with pytest.raises(ConfigError, match=r"the 4 heads of the recurrent layers of Mamba2ForCausalLM .* use at most 4") as told:
        config_of(model, tensor_parallel_size=5)
    assert "attention" not in str(told.value)
    bamba = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [3]}
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1}
    (model / "config.json").write_text(json.dumps({**CONFIG, **bamba, **sizes}))
    (model / "draft").mkdir()
    (model / "draft" / "config.json").write_text(json.dumps(CONFIG))
    for device, right in (
        ("cpu", r'Take {"method": "ngram"} or {"method": "suffix"}'),
        ("cuda", "Leave speculative_config out"),
    ):
        with pytest.raises(ConfigError, match=right):
            config_of(model, device, speculative_config={"method": "draft_model", "model": str(model / "draft")})
    assert config_of(model, speculative_config={"method": "ngram"}).speculation is not None


def test_the_wrong_format(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        resolve(EngineArgs(model=str(model), load_format="gguf"), lambda: "cpu", describe)


def test_default_sampling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    brought = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "top_p": None, "do_sample": True, "eos_token_id": 7}
    (model / "generation_config.json").write_text(json.dumps(brought))
    assert config_of(model).default_sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert config_of(model, override_generation_config={"top_k": 5}).default_sampling["top_k"] == 5
    assert config_of(model, generation_config="vllm").default_sampling == {}
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    assert config_of(model, generation_config=str(other)).default_sampling == {"top_p": 0.5}
    (model / "generation_config.json").write_text('{"temperature": 5}')
    with pytest.raises(ConfigError, match="generation_config='vllm'"):
        config_of(model)


def test_names(model: Path) -> None:
    assert config_of(model, served_model_name="a").served_names == ("a",)
    assert config_of(model, served_model_name=["a", "b"]).served_names == ("a", "b")


def test_memory_formulas() -> None:
    small = activation_bytes(CONFIG, element_bytes=2, tokens=1000, rows=1)
    assert small == 1000 * 2 * (2 * 64 + 3 * 128)
    head = activation_bytes({**CONFIG, "vocab_size": 10**6}, element_bytes=2, tokens=1000, rows=10)
    assert head == 1000 * 2 * 2 * 64 + 10 * 2 * 10**6 * 4
    moe = {**CONFIG, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert estimate_parameters(moe) - estimate_parameters(CONFIG) == 4 * (8 * 3 * 64 * 32 + 64 * 8 - 3 * 64 * 128)
    assert host_cache_bytes(2**30) == int(0.4 * 2**30)
    assert host_cache_bytes(2**40) == 4 * 2**30
    assert host_cache_bytes(-5) == 0
