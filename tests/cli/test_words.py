"""MODEL TEXT..., or TEXT alone: what `quire run` and `quire chat` make of their words."""

import argparse
import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from gguf_files import tiny_llama
from quire.cli import parser as words
from quire.cli.main import main, make_parser
from quire.types.errors import ConfigError


def taken(*line: str) -> tuple[str, list[str]]:
    namespace: argparse.Namespace = make_parser(["run"]).parse_args(["run", *line])
    args, texts = words.take_words(namespace, namespace.words)
    return args.model, texts


@pytest.mark.parametrize(
    ("line", "model", "texts"),
    [
        ([], "smollm2", []),
        (["Hello"], "smollm2", ["Hello"]),
        (["The capital of France is"], "smollm2", ["The capital of France is"]),
        (["smollm2"], "smollm2", []),
        (["smollm2", "Hello"], "smollm2", ["Hello"]),
        (["org/name", "Hello", "Bye"], "org/name", ["Hello", "Bye"]),
        (["org/name:Q4_K_M"], "org/name:Q4_K_M", []),
        (["gpt2", "Hello"], "gpt2", ["Hello"]),
        (["./nothing"], "./nothing", []),
        (["nothing.gguf", "Hello"], "nothing.gguf", ["Hello"]),
        (["--model", "gpt2", "Hello", "Bye"], "gpt2", ["Hello", "Bye"]),
        (["gpt2", "--max-tokens", "5", "Hello"], "gpt2", ["Hello"]),
        (["--max-tokens", "5", "gpt2", "--top-p", "0.5", "Hello"], "gpt2", ["Hello"]),
        (["gpt2", "--", "--what is this"], "gpt2", ["--what is this"]),
        (["gpt2", "-1 + 2 ="], "gpt2", ["-1 + 2 ="]),
        (["a" * 5000], "smollm2", ["a" * 5000]),
        (["and/or what"], "smollm2", ["and/or what"]),
    ],
)
def test_words(line: list[str], model: str, texts: list[str]) -> None:
    assert taken(*line) == (model, texts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["The capital of France is", "Hello"], "of several arguments the first is the model"),
        (["--model", "gpt2", "smollm2", "Hello"], "the model was given twice"),
    ],
)
def test_what_cannot_be_meant(line: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        taken(*line)


def test_a_model_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    assert taken("my model") == ("smollm2", ["my model"]), "a directory without a model is no model"
    tiny_llama(tmp_path / "my model" / "m.gguf")
    assert taken("my model") == ("my model", [])
    assert taken("my model", "Hello") == ("my model", ["Hello"])


def test_a_model_of_a_file_gives_way_to_one_among_the_words(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: gpt2\nmax-tokens: 3\n")
    assert taken("--config", str(file), "Hello") == ("gpt2", ["Hello"])
    assert taken("--config", str(file), "smollm2", "Hello") == ("smollm2", ["Hello"])
    assert taken("Hello", "--config", str(file), "Bye") == ("gpt2", ["Hello", "Bye"])


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_to_complete(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = io.StringIO("\n")
    monkeypatch.setattr(nothing, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdin", nothing)
    with pytest.raises(ConfigError, match=r'there is no prompt.* quire run gpt2 "'):
        words.read_text("run", "gpt2")


def test_a_first_message_is_repeated_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.cli import chat as module

    engine = SimpleNamespace(config=SimpleNamespace(default_sampling={}))
    monkeypatch.setattr(module, "load_engine", lambda _: engine)
    monkeypatch.setattr(module.Conversation, "say", lambda self, text: print(f"answer to {text}"))
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    assert main(["chat", "smollm2", "Say hello"]) == 0
    assert capsys.readouterr().out == "answer to Say hello\n"


def test_an_empty_prompt_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "./nothing", "Hello", ""]) == 2
    assert "a prompt is empty" in capsys.readouterr().err
