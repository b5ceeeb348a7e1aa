"""`--help` is short, and tells more when asked; what is misspelt gets a suggestion, in one line."""

import pytest

from quire.cli.main import COMMANDS, main


def said(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(line)
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_or_two(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, command, "--help")
    assert code == 0
    assert len(out.splitlines()) < 80
    assert out.startswith(f"usage: quire {command}")


def test_short_help_names_what_most_need_and_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    _, short, _ = said(capsys, "serve", "--help")
    assert all(flag in short for flag in ("--port", "--max-model-len", "--api-key", "engine: scheduler (", "--help=all"))
    assert "--ssl-ciphers" not in short
    _, whole, _ = said(capsys, "serve", "--help=all")
    assert all(flag in whole for flag in ("--port", "--ssl-ciphers", "--long-prefill-token-threshold"))
    _, run, _ = said(capsys, "run", "--help")
    assert "--max-tokens" in run and "--served-model-name" not in run


@pytest.mark.parametrize(
    ("topic", "there", "absent"),
    [
        ("CacheConfig", "--block-size", "--max-num-seqs"),
        ("scheduler", "--max-num-seqs", "--block-size"),
        ("engine: scheduler", "--max-num-seqs", "--block-size"),
        ("Frontend", "--ssl-ciphers", "--block-size"),
        ("max_model_len", "--max-model-len", "--max-num-seqs"),
        ("--max-model-len", "--max-model-len", "--max-num-seqs"),
        ("certificate", "--ssl-keyfile", "--port"),
        ("listgroup", "engine: cache and memory", "--port"),
    ],
)
def test_help_about(topic: str, there: str, absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "serve", f"--help={topic}")
    assert code == 0
    assert there in out and absent not in out


def test_help_is_a_command_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "help", "run")[1].startswith("usage: quire run")
    assert "examples:" in said(capsys, "help")[1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["sevre"], "quire: unknown command 'sevre'; did you mean serve?"),
        (["quux"], "quire: unknown command 'quux'; there are serve, run, chat"),
        (["bench", "latencey"], "quire bench: unknown measurement 'latencey'; did you mean latency?"),
        (["serve", "--prot", "1"], "quire serve: unknown option --prot; did you mean --port"),
        (["serve", "--kv-transfer-confg", "{}"], "--kv-transfer-confg; did you mean --kv-transfer-config or "),
        (["serve", "--trust_remote_cod"], "unknown option --trust-remote-cod; did you mean --trust-remote-code?"),
        (["serve", "--swap-spce", "4"], "unknown option --swap-spce; did you mean --swap-space"),
        (["serve", "--no-enable-prefx-caching"], "did you mean --no-enable-prefix-caching"),
        (["serve", "--enable-dbbo"], "did you mean --enable-dbo or --enable-lora or --enable-eplb?"),
        (["run", "--dtype", "bf16"], "got 'bf16'; did you mean bfloat16?"),
        (["run", "--max-tokens", "many"], "quire run: argument --max-tokens: invalid int value: 'many'"),
        (["serve", "--help=schedular"], "there is no such section or option; did you mean scheduler"),
        (["serve", "--help=qqqq"], "--help=listgroup lists the sections"),
        (["models", "extra"], "quire: unrecognized arguments: extra"),
    ],
)
def test_mistakes_are_one_line(line: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, *line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
