"""What README and the docs show runs as it stands: Python, curl and JSON beside one server; of `quire ...` flags are read."""

import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire
from patience import PATIENCE
from quire import LLM, EngineArgs
from quire.cli.main import make_parser
from serving import Running
from tiny_model import make_model

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(quire [^`]+)`")
REGISTERS = "register_format"  # in a table of the process
ADDRESS = "http://127.0.0.1:8000"
PLACEHOLDERS = {"MODEL": "smollm2", "DIR": "smollm2", "NAME": "mixed", "N": "1", "COMMAND": "serve"}


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets() -> list[Snippet]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            found.append(Snippet(page.name, text.count("\n", 0, block.start()) + 1, block[1], block[2]))
    return found


def commands() -> list[tuple[str, str]]:
    """Lines of blocks without a language, continued ones joined, and what stands in backticks."""
    lines = [
        (str(one), line.strip())
        for one in snippets()
        if one.language in ("", "sh", "bash", "console")
        for line in one.text.replace("\\\n", " ").splitlines()
        if line.startswith(("quire ", "curl "))
    ]
    return lines + [(page.name, line) for page in PAGES for line in INLINE.findall(page.read_text())]


PYTHON = [one for one in snippets() if one.language == "python"]
JSON = [one for one in snippets() if one.language == "json"]
QUIRE = sorted({line for _, line in commands() if line.startswith("quire ")})
ENDLESS = "/engine/events"  # test_feed.py reads it
CURL = [(where, line) for where, line in commands() if line.startswith("curl ") and ENDLESS not in line]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for the default model, which test_default_model.py and test_default_model_served.py run."""
    return make_model(tmp_path_factory.mktemp("small"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def url(small: Path) -> Iterator[str]:
    brief = {"max_new_tokens": 64}  # it has no end of its own
    running = Running(small, served_model_name="smollm2", max_num_batched_tokens=1024, override_generation_config=brief)
    yield str(running.http.base_url)
    running.close()


@pytest.fixture(scope="module")
def pooling_url(small: Path) -> Iterator[str]:
    running = Running(small, runner="pooling")
    yield str(running.http.base_url)
    running.close()


@pytest.fixture(scope="module")
def shared_llm(small: Path) -> LLM:
    return LLM(str(small), max_model_len=4096)


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 4 and len(CURL) >= 2 and len(QUIRE) >= 8 and JSON


@pytest.mark.parametrize("snippet", [one for one in PYTHON if REGISTERS not in one.text], ids=str)
def test_python(snippet: Snippet, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where much of what it imports is there already."""
    code = snippet.text
    if ADDRESS in code:
        code = code.replace(ADDRESS, request.getfixturevalue("url"))
    if " LLM(" in code:
        llm = request.getfixturevalue("shared_llm")

        def open_model(model: str, **args: object) -> LLM:
            EngineArgs(model=model, **args)
            if "logits_processors" in args:
                return LLM(str(request.getfixturevalue("small")), **args)
            return llm if model == "smollm2" else LLM(model, **args)

        monkeypatch.setattr(quire, "LLM", open_model, raising=False)
    if "EngineArgs(" in code:
        small = request.getfixturevalue("small")
        monkeypatch.setattr(quire, "EngineArgs", lambda model: EngineArgs(model={"smollm2": str(small)}[model]), raising=False)
    capsys = request.getfixturevalue("capsys")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(snippet), "exec"), names)
    if "client" in names:  # a program ends with its connections open; this process goes on
        names["client"].close()
    assert "print(" not in code or capsys.readouterr().out.strip()


@pytest.mark.parametrize("snippet", [one for one in PYTHON if REGISTERS in one.text], ids=str)
def test_python_that_others_should_not_see(snippet: Snippet) -> None:
    subprocess.run([sys.executable, "-c", snippet.text], timeout=PATIENCE, check=True)


@pytest.mark.parametrize(("where", "line"), CURL)
def test_curl(where: str, line: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("pooling_url" if where.startswith("pooling.md") else "url")
    done = subprocess.run(line.replace(ADDRESS, url), shell=True, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "error" not in json.loads(done.stdout), done.stdout


@pytest.mark.parametrize("snippet", JSON, ids=str)
def test_fields_of_requests(snippet: Snippet, url: str) -> None:
    for line in snippet.text.splitlines():
        asked = {"messages": [{"role": "user", "content": "yes or no?"}], "max_tokens": 20, **json.loads(line)}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text


whole_parser = functools.cache(make_parser)  # 4,000 arguments


@pytest.mark.parametrize("line", QUIRE)
def test_commands_have_the_flags_they_are_shown_with(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)[1:]]
    try:
        whole_parser().parse_args(words)
    except SystemExit as ended:
        said = capsys.readouterr()
        assert ended.code == 0 or words == ["bench"], said.err
