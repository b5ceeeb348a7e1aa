"""`quire chat`, from its standard input to its standard output, with a tiny model."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli import chat as module
from quire.cli.main import main
from quire.cli.parser import load_engine
from quire.config.args import EngineArgs
from quire.types.sampling import SamplingParams
from tiny_model import make_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = make_model(tmp_path_factory.mktemp("chat"))
    engine = load_engine(EngineArgs(model=str(model), device="cpu", kv_cache_memory_bytes=1 << 20))
    yield engine
    engine.shutdown()


class Chat:
    """What one run of the command printed, and the prompt and parameters of each request."""

    def __init__(self, out: str, notes: str, asked: list[tuple[str, SamplingParams]]) -> None:
        self.out, self.notes, self.asked = out, notes, asked


@pytest.fixture
def chat(engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(module, "load_engine", lambda _: engine)

    def run(*lines: str | bytes, flags: tuple[str, ...] = ()) -> Chat:
        asked: list[tuple[str, SamplingParams]] = []
        add = type(engine).add_request

        def watched(request_id: str, prompt: Any, params: SamplingParams) -> None:
            asked.append((prompt["prompt"], params))
            add(engine, request_id, prompt, params)

        monkeypatch.setattr(engine, "add_request", watched)
        typed = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        assert main(["chat", "./model", "--max-tokens", "3", "--temperature", "0", *flags]) == 0
        told = capsys.readouterr()
        return Chat(told.out, told.err, asked)

    return run


def test_a_conversation_remembers_until_it_is_cleared(chat: Any) -> None:
    found = chat("hi", "", "again", "/reset", "fresh", "/exit", "never")
    prompts = [prompt for prompt, _ in found.asked]
    assert prompts[0] == "<user>hi</s><assistant>" and prompts[1].startswith(prompts[0]) and prompts[1] != prompts[0]
    assert prompts[2:] == ["<user>fresh</s><assistant>"]
    assert "cleared" in found.notes and "cleared" not in found.out


def test_sampling_parameters_are_set(chat: Any) -> None:
    found = chat("/set temperature 0.5", "/set max-tokens 2", "/set stop a b", "hi", "/set temperature default", "hi", "/show")
    first, second = (params for _, params in found.asked)
    assert (first.temperature, first.max_tokens, first.stop) == (0.5, 2, ["a b"])
    assert (second.temperature, second.max_tokens) == (0.0, 2)
    for line in (
        "temperature = 0.5",
        'stop = ["a b"]',
        "temperature          0.0",
        "max_tokens           2",
        "system prompt: none",
    ):
        assert line in found.notes
    assert "4 messages so far" in found.notes and "context 256 tokens" in found.notes


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/set temprature 0", "/set temprature: unknown name; did you mean temperature?"),
        ("/set", "/set NAME VALUE: known are max_tokens, temperature"),
        ("/set top_p", "a value is missing, as in /set top_p 0.9"),
        ("/set top_k many", "/set top_k: the value must be like 40; got 'many'"),
        ("/set top_p 7", "/set top_p: top_p must be"),
        ("/rest", "unknown command /rest; did you mean /reset"),
        ("/sett temperature 0", "unknown command /sett; did you mean /set"),
        ("/clear all", "/clear takes no argument; got 'all'"),
        ("/save", "/save: a file name is missing"),
        ("/save /nowhere/x.json", "/save: cannot write /nowhere/x.json"),
        ("/save a\0b", "/save: cannot write a\0b: embedded null byte"),
        ("/load a\0b", "/load: cannot read a\0b: embedded null byte"),
        ("/load /nowhere/x.json", "/load: cannot read /nowhere/x.json"),
    ],
)
def test_a_wrong_command_is_explained_and_changes_nothing(chat: Any, line: str, answer: str) -> None:
    found = chat(line, "hi")
    assert answer in found.notes and found.out.count("\n") == 1
    ((prompt, params),) = found.asked
    assert prompt == "<user>hi</s><assistant>" and (params.temperature, params.top_p, params.max_tokens) == (0.0, 1.0, 3)


def test_help_lists_every_command(chat: Any) -> None:
    found = chat("/help")
    for name in ("/help", "/set NAME VALUE", "/show", "/system TEXT", "/clear", "/save FILE", "/load FILE", "/exit", '"""'):
        assert f"  {name}" in found.notes


def test_the_system_prompt_is_replaced_within_a_conversation(chat: Any) -> None:
    found = chat("hi", "/system be brief", "hi", "/system", "hi", flags=("--system", "be kind"))
    starts = [prompt.partition("<user>")[0] for prompt, _ in found.asked]
    assert starts == ["<system>be kind</s>", "<system>be brief</s>", ""]


def test_paths_spaces_and_blocks_are_messages(chat: Any) -> None:
    found = chat("/usr/bin is what?", "/clear", " /exit is what?", "/clear", '"""/one', "two", 'three"""', "/clear", '"""x"""')
    contents = [prompt.removeprefix("<user>").removesuffix("</s><assistant>") for prompt, _ in found.asked]
    assert contents == ["/usr/bin is what?", "/exit is what?", "/one\ntwo\nthree", "x"]


def test_a_conversation_is_saved_and_loaded(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    before = chat("/system be brief", "hi", f"/save {path}")
    saved = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[2]["content"] == before.out.removesuffix("\n")
    after = chat(f"/load {path}", "again")
    assert after.asked[0][0].startswith(f"<system>be brief</s><user>hi</s><assistant>{saved[2]['content']}</s><user>again")
    path.write_text('{"messages": [{"role": "cook", "content": "x"}]}')
    assert "must hold" in chat(f"/load {path}").notes


def test_bytes_that_are_not_utf8_are_a_message_and_lone_surrogates_are_saved(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text('{"messages": [{"role": "user", "content": "\\udcff"}]}')
    found = chat(b"\xff hi", f"/load {path}", f"/save {path}")
    assert [prompt for prompt, _ in found.asked] == ["<user>\ufffd hi</s><assistant>"]
    assert "saved 1 messages" in found.notes
    assert json.loads(path.read_text())["messages"] == [{"role": "user", "content": "\udcff"}]


def test_every_conversation_has_a_seed_of_its_own(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(module, "load_engine", lambda args: seeds.append(args.seed) or engine)
    for flags in ([], [], ["--seed", "5"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
        assert main(["chat", "./model", *flags]) == 0
    assert seeds[0] != seeds[1] and seeds[2] == 5
