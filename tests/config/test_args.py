import argparse
import dataclasses

import pytest

from quire.cli.parser import Parser
from quire.config.args import EngineArgs, add_cli_arguments, one_at_a_time
from quire.config.fields import read_number, spec_of
from quire.config.refused import REFUSED
from quire.types.errors import ConfigError


def from_line(line: str) -> EngineArgs:
    parser = Parser(prog="quire")
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
    parser = Parser(prog="quire")
    add_cli_arguments(parser)
    help_text = parser.format_help()
    for field in dataclasses.fields(EngineArgs):
        assert spec_of(field).help
        assert f"--{field.name.replace('_', '-')}" in help_text
    assert "tensor-parallel" not in help_text


def test_flags() -> None:
    args = from_line("--model m --max_model_len 8k --no-enable-prefix-caching --async-scheduling --dtype half")
    assert (args.model, args.max_model_len, args.enable_prefix_caching, args.async_scheduling, args.dtype) == (
        "m", 8000, False, True, "half",
    )  # fmt: skip
    assert from_line("--max-model-len auto").max_model_len == -1
    assert from_line("--max-model-len=-1").max_model_len == -1
    assert from_line('--hf_overrides={"a_b":1}').hf_overrides == {"a_b": 1}
    assert from_line("--served-model-name a b").served_model_name == ["a", "b"]
    assert from_line("--tensor_parallel_size 1 --trust-remote-code=false -tp 1") == EngineArgs()


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("1k", 1000), ("1K", 1024), ("2.5m", 2_500_000), ("1G", 2**30), ("-1", -1), ("auto", -1)],
)
def test_numbers(text: str, value: int) -> None:
    assert read_number(text) == value
    assert EngineArgs(max_model_len=text).max_model_len == value  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "k", "1kk", "1.5", "0x10", "-2", "1e3"])
def test_what_is_not_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        read_number(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_modle_len": 5}, r"unknown engine argument 'max_modle_len'; did you mean max_model_len"),
        ({"xyzzy": 5}, r"unknown engine argument 'xyzzy'$"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2 is not supported: .*one device.*at 1"),
        ({"quantization": "awq"}, r"quantization='awq' is not supported"),
        ({"trust_remote_code": True}, r"no code from a model repository"),
        ({"trust_remote_code": 0}, r"trust_remote_code=0"),
        ({"dtype": "int8"}, r"dtype must be one of auto, .*got 'int8'"),
        ({"dtype": None}, r"dtype must be a string"),
        ({"seed": True}, r"seed must be a whole number"),
        ({"seed": -1}, r"seed must be at least 0"),
        ({"max_num_seqs": 0}, r"max_num_seqs must be at least 1"),
        ({"max_model_len": -2}, r"max_model_len must be at least -1"),
        ({"max_model_len": "lots"}, r"max_model_len: 'lots' is not a whole number"),
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


def test_refused_and_real_fields_do_not_overlap() -> None:
    assert not {field.name for field in dataclasses.fields(EngineArgs)} & set(REFUSED)


def test_dicts_are_not_shared() -> None:
    EngineArgs().hf_overrides["x"] = 1
    assert EngineArgs().hf_overrides == {}


def test_refused_flags_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=2"):
        from_line("-tp 2")
    with pytest.raises(ConfigError, match="enable_lora=True"):
        from_line("--enable-lora")


def test_typos_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        ("--max-modle-len 5", "unknown option --max-modle-len; did you mean --max-model-len"),
        ("--max-model 5", "unknown option --max-model"),
        ("--max-model-len x", "'x' is not a whole number"),
        ("--hf-overrides {", "not JSON"),
        ("--dtype int8", "invalid choice: 'int8'"),
    ):
        with pytest.raises(SystemExit) as caught:
            from_line(line)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_namespaces_may_hold_more() -> None:
    assert EngineArgs.from_cli(argparse.Namespace(model="m", prompt="x", run=print)) == EngineArgs(model="m")
