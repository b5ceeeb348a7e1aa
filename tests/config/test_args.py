import argparse
import dataclasses
from pathlib import Path

import pytest

from quire import AsyncEngineArgs
from quire.cli.main import make_parser
from quire.cli.parser import CommandParser
from quire.config.args import EngineArgs, add_cli_arguments, one_at_a_time
from quire.config.fields import FLAG, LIST, OBJECT, TEXT, read_number, spec_of
from quire.config.vllm_arguments import HINTS, REFUSED
from quire.types.errors import ConfigError


def from_line(line: str) -> EngineArgs:
    parser = CommandParser(prog="quire")
    add_cli_arguments(parser)
    return EngineArgs.from_cli(parser.parse_args(line.split()))


def test_commands_for_one_request_make_an_engine_for_one():
    assert one_at_a_time(EngineArgs()).max_num_seqs == 1
    assert one_at_a_time(EngineArgs(max_num_seqs=8)).max_num_seqs == 8


def test_defaults_are_vllms() -> None:
    args = EngineArgs()
    assert (args.model, args.seed, args.max_logprobs, args.block_size) == ("smollm2", 0, 20, None)
    assert (args.gpu_memory_utilization, args.enable_prefix_caching, args.scheduling_policy) == (0.92, True, "fcfs")
    assert from_line("") == args


def test_every_field_has_help_and_a_flag() -> None:
    parser = CommandParser(prog="quire")
    add_cli_arguments(parser)
    help_text = parser.format_help()
    for field in dataclasses.fields(EngineArgs):
        assert spec_of(field).help
        assert f"--{field.name.replace('_', '-')}" in help_text
    assert "decode-context-parallel" not in help_text


def test_flags() -> None:
    args = from_line("--model m --max_model_len 8k --no-enable-prefix-caching --async-scheduling --dtype half")
    assert (args.model, args.max_model_len, args.enable_prefix_caching, args.async_scheduling, args.dtype) == (
        "m", 8000, False, True, "half",
    )  # fmt: skip
    assert from_line("--max-model-len auto").max_model_len == -1
    assert from_line("--max-model-len=-1").max_model_len == -1
    assert from_line('--hf_overrides={"a_b":1}').hf_overrides == {"a_b": 1}
    assert from_line("--served-model-name a b").served_model_name == ["a", "b"]
    assert from_line("--enable_eplb=false --trust-remote-code=false -pp 1") == EngineArgs()
    stages = from_line("-pp 3 --pipeline-layer-partition 4,5,5")
    assert (stages.pipeline_parallel_size, stages.pipeline_layer_partition) == (3, "4,5,5")
    ranks = from_line("-tp 3 -ep --distributed_executor_backend mp")
    assert (ranks.tensor_parallel_size, ranks.enable_expert_parallel, ranks.distributed_executor_backend) == (3, True, "mp")


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("1k", 1000), ("1K", 1024), ("2.5m", 2_500_000), ("1G", 2**30), ("-1", -1), ("auto", -1)],
)
def test_numbers(text: str, value: int) -> None:
    assert read_number(text) == value
    assert EngineArgs(max_model_len=text).max_model_len == value  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "k", "1kk", "1.5", "0x10", "-2", "1e3"])
def test_what_is_not_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="not an integer"):
        read_number(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_modle_len": 5}, r"unknown engine argument 'max_modle_len'; did you mean max_model_len"),
        ({"batch_invariant": True}, r"unknown engine argument 'batch_invariant'; did you mean deterministic\?"),
        ({"xyzzy": 5}, r"unknown engine argument 'xyzzy'$"),
        ({"decode_context_parallel_size": 2}, r"decode_context_parallel_size=2 is not supported: of the ways .*at 1"),
        ({"pipeline_parallel_size": 0}, r"pipeline_parallel_size must be at least 1"),
        ({"pipeline_layer_partition": "4,x"}, r"pipeline_layer_partition must be how many layers each stage has.*got '4,x'"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be at least 1"),
        ({"distributed_executor_backend": "spark"}, r"must be one of auto, mp, ray, external_launcher, uni, fake"),
        ({"speculative_config": {"model": "x", "method": "dflash"}}, r"speculative_config.method 'dflash' is not built"),
        ({"kv_cache_dtype": "fp4"}, r"kv_cache_dtype must be one of auto, .*fp8_e5m2; got 'fp4'"),
        (
            {"kv_cache_dtype_skip_layers": ["0"]},
            r"kv_cache_dtype_skip_layers=\['0'\] is not supported: the caches of all layers",
        ),
        ({"trust_remote_code": 0}, r"trust_remote_code must be true or false"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"hf_overrides replaces it"),
        ({"load_format": "pt"}, r"load_format must be one of auto, safetensors, mistral, gguf, dummy; got 'pt'"),
        (
            {"load_format": "bitsandbytes"},
            r"load_format='bitsandbytes' is not supported: .* Leave it out, or use quantization=",
        ),
        ({"speculative_config": {}}, r"speculative_config needs a method \(.*--spec-method\): ngram, suffix"),
        (
            {"spec_method": "eagle"},
            r"method 'eagle' requires a draft model or head: speculative_config.model, or --spec-model",
        ),
        ({"dtype": "int8"}, r"dtype must be one of auto, .*got 'int8'"),
        ({"dtype": None}, r"dtype must be a string"),
        ({"seed": True}, r"seed must be an integer"),
        ({"seed": -1}, r"seed must be at least 0"),
        ({"max_num_seqs": 0}, r"max_num_seqs must be at least 1"),
        ({"max_model_len": -2}, r"max_model_len must be at least -1"),
        ({"max_model_len": "lots"}, r"max_model_len: 'lots' is not an integer"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be above 0"),
        ({"gpu_memory_utilization": 1.01}, r"gpu_memory_utilization must be at most 1"),
        ({"gpu_memory_utilization": float("nan")}, r"gpu_memory_utilization must be"),
        ({"enforce_eager": 1}, r"enforce_eager must be true or false"),
        ({"hf_overrides": len}, r"hf_overrides must be a dict"),
        ({"served_model_name": [1]}, r"served_model_name must be a string or a list"),
        ({"block_size": 512}, r"block_size must be at most 256"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs.from_kwargs(**values)


def test_what_asks_for_nothing_is_accepted() -> None:
    neutral = {name: harmless[0] if harmless else None for name, (_, harmless) in REFUSED.items()}
    assert EngineArgs.from_kwargs(**neutral, model="m") == EngineArgs(model="m")
    assert EngineArgs.from_kwargs(**dict.fromkeys(REFUSED)) == EngineArgs()


def test_the_constructor_knows_vllms_other_names_as_well(caplog: pytest.LogCaptureFixture) -> None:
    args = AsyncEngineArgs(model="m", enable_eplb=False, trust_remote_code=True, disable_log_requests=True)
    assert args == EngineArgs(model="m")
    assert "trust_remote_code=True has no effect" in caplog.text and "disable_log_requests=True" in caplog.text
    with pytest.raises(ConfigError, match="enable_prompt_embeds=True is not supported"):
        EngineArgs(enable_prompt_embeds=True)
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        EngineArgs(max_modle_len=5)


def test_a_name_is_in_one_list() -> None:
    names = [*(field.name for field in dataclasses.fields(EngineArgs)), *REFUSED, *HINTS]
    assert len(names) == len(set(names))


HINTED = {FLAG: True, OBJECT: {"mode": 3}, LIST: [1, 2], TEXT: "x"}


@pytest.mark.parametrize("name", HINTS)
def test_hints_are_taken_and_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, kind = HINTS[name]
    assert EngineArgs.from_kwargs(**{name: HINTED[kind]}) == EngineArgs()
    assert f"{name}={HINTED[kind]!r} has no effect: {reason}" in caplog.text
    caplog.clear()
    EngineArgs.from_kwargs(**{name: None})
    assert not caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "--trust-remote-code --model m", "--trust-remote-code=true --model m", "-O3 --model m", "-O 3 --model m",
        "--optimization-level=0 --model m", "--cudagraph-capture-sizes 1 2 4 --model m", "-cc.mode=3 --model m",
        "--compilation-config {\"mode\":3} --model m", "--compilation_config.cudagraph_mode NONE --model m",
        "--attention-backend FLASHINFER --model m", "--disable-custom-all-reduce --model m", "--watermark 0.01 --model m",
        "--mm-hasher-algorithm sha256 --model m", "--structured-outputs-config.backend outlines --model m",
    ],
)  # fmt: skip
def test_hints_on_the_command_line(line: str, caplog: pytest.LogCaptureFixture) -> None:
    args = from_line(line)
    args.structured_outputs_config = {}
    assert args == EngineArgs(model="m")
    assert "has no effect" in caplog.text


def test_values_that_are_taken_for_others(caplog: pytest.LogCaptureFixture) -> None:
    args = from_line("--model-impl vllm --load-format runai_streamer")
    assert (args.model_impl, args.load_format) == ("quire", "auto")
    assert caplog.text.count("is equivalent to") == 2


def test_flags_that_are_told_true_or_false() -> None:
    lines = ["--enforce-eager=true", "--no-enforce-eager=false", "--enforce-eager=false", "--no-enforce-eager=true"]
    assert [from_line(line).enforce_eager for line in lines] == [True, True, False, False]


def test_flags_with_dots() -> None:
    args = from_line(
        "--structured-outputs-config.disable_any_whitespace true --hf_overrides.rope_parameters.rope_theta=1e6 "
        '--hf-overrides {"a":1,"b":2} --hf-overrides.b 3 --hf-overrides.list+ x --hf-overrides.list+ 2 --hf-overrides.on'
    )
    assert args.structured_outputs_config == {"disable_any_whitespace": True}
    assert args.hf_overrides == {"rope_parameters": {"rope_theta": 1e6}, "a": 1, "b": 3, "list": ["x", 2], "on": True}
    with pytest.raises(ConfigError, match="seed must be an integer"):
        from_line("--seed.x 1")


def test_flags_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: small\nmax_model_len: 8k\nenable-prefix-caching: false\nenforce-eager: true\nhf-token: null\n"
        "served-model-name: [a, b]\ngpu-memory-utilization: 0.5\ntrust-remote-code: true\n"
        "hf-overrides:\n  rope_parameters: {rope_theta: 10}\n  x: [1]\n"
    )
    args = from_line(f"--config {file}")
    assert (args.model, args.max_model_len, args.enable_prefix_caching, args.enforce_eager) == ("small", 8000, False, True)
    assert (args.served_model_name, args.gpu_memory_utilization, args.hf_token) == (["a", "b"], 0.5, None)
    assert args.hf_overrides == {"rope_parameters": {"rope_theta": 10}, "x": [1]}
    wins = from_line(f"--max-model-len 64 --config={file} --served-model-name c --enable-prefix-caching --hf-overrides.x 2")
    assert (wins.max_model_len, wins.served_model_name, wins.enable_prefix_caching) == (64, ["c"], True)
    assert (wins.hf_overrides["x"], wins.model) == (2, "small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 5", "unknown option --max-modle-len; did you mean --max-model-len"),
        ("[1, 2]", "must map the names of flags"),
        ("a: [", "is not YAML"),
        ("config: other.yaml", "cannot name another one"),
        ("max-model-len: x", "'x' is not an integer"),
    ],
)
def test_files_that_are_wrong(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flags.yml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        from_line(f"--config {file}")
    assert message in capsys.readouterr().err


def test_files_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (("nowhere.yaml", "No such file"), ("flags.json", "takes a YAML file")):
        with pytest.raises(SystemExit):
            from_line(f"--config {name}")
        assert message in capsys.readouterr().err


def test_dicts_are_not_shared() -> None:
    EngineArgs().hf_overrides["x"] = 1
    assert EngineArgs().hf_overrides == {}


def test_refused_flags_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="decode_context_parallel_size=2"):
        from_line("--decode-context-parallel-size 2")
    with pytest.raises(ConfigError, match="enable_prompt_embeds=True"):
        from_line("--enable-prompt-embeds")


def test_typos_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        ("--max-modle-len 5", "unknown option --max-modle-len; did you mean --max-model-len"),
        ("--max-model 5", "unknown option --max-model"),
        ("--gpu-mem 0.5", "unknown option --gpu-mem; did you mean --gpu-memory-utilization?"),
        ("--batch-invariant", "unknown option --batch-invariant; did you mean --deterministic?"),
        ("--enable_deterministic_inference", "did you mean --deterministic?"),
        ("--max-model-len x", "'x' is not an integer"),
        ("--kv-offloading-size 4GiB", "'4GiB' is not a number, such as 4 or 0.5"),
        ("--hf-overrides {", "not JSON"),
        ("--limit-mm-per-prompt image=4", """Write it as '{"name": value}'"""),
        ("--dtype int8", "got 'int8'"),
    ):
        with pytest.raises(SystemExit) as caught:
            from_line(line)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_namespaces_may_hold_more() -> None:
    assert EngineArgs.from_cli(argparse.Namespace(model="m", prompt="x", run=print)) == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("enable_dbo", True, False), ("all2all_backend", "deepep_low_latency", "allgather_reducescatter"),
        ("video_pruning_rate", 0.5, 0),
    ],
)  # fmt: skip
def test_what_would_change_capacity_or_answers_is_refused_unless_it_asks_for_nothing(name, value, fine):
    EngineArgs(**{name: fine})
    with pytest.raises(ConfigError, match=f"^{name}=.* is not supported: .*; leave it out"):
        EngineArgs(**{name: value})


def test_numa_bind_needs_itself():
    with pytest.raises(ConfigError, match="require numa_bind"):
        EngineArgs(numa_bind_nodes=["0"])


def test_every_flag_of_vllm_is_known(capsys):
    """Those of its newest version: taken, or refused with a reason."""
    parser = make_parser(["serve"])
    for flag in ("--jit-monitor-mode warn", "--use-fp64-gumbel", "--max-num-queued-reqs 5", "--numa-bind", "--mamba-backend x",
                 "--dp-supervisor-probe-interval-s 3", "--cohere-format cmd3", "--num-speculative-tokens 3",
                 "--enable-return-routed-experts", "--fault-tolerance-config {}", "--tokenizer-pool-size 2",
                 "--sse-keep-alive-interval 0"):  # fmt: skip
        parser.parse_args(["serve", *flag.split()])
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--max-model-length", "5"])
    assert "unknown option --max-model-length; did you mean --max-model-len" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="speculative_config replaces it"):
        EngineArgs(num_speculative_tokens=3)
