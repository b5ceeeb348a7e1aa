"""The scripts of examples/ run as they are, in this process, with tiny models and one server."""

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import serving

from adapters import halves, write_adapter
from sentence_models import save_text_encoder
from tiny_model import make_model

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(script, *arguments) -> what the script prints."""

    def run(script: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("examples"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(model, "--batch-dir", str(tmp_path_factory.mktemp("batches")), latency=0) as server:
        yield f"{server.url()}/v1"


def test_every_script_is_listed_and_has_a_test() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    listed, tests = ((path.read_text(encoding="utf-8")) for path in (EXAMPLES / "README.md", Path(__file__)))
    assert scripts and all(f"| `{name}` |" in listed and f'"{name}"' in tests for name in scripts)


def test_offline(run: Run, model: Path) -> None:
    assert run("offline.py", "--model", model).count(" -> ") == 3


def test_chat(run: Run, model: Path) -> None:
    assert run("chat.py", "--model", model).count("Q: ") == 2


def test_structured_outputs(run: Run, model: Path) -> None:
    printed = run("structured_outputs.py", "--model", model)
    assert (
        "parsed: {'name': " in printed and "'I love this book' is  " in printed and "A date of the year 2026:  2026-" in printed
    )


def test_lora(run: Run, model: Path, tmp_path: Path) -> None:
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    write_adapter(tmp_path, halves(module, 32, 32), lora_alpha=400, target_modules=["q_proj"])
    plain, adapted = run("lora.py", "--model", model, "--adapter", tmp_path).splitlines()[-2:]
    assert plain.removeprefix("model: ") != adapted.removeprefix("with adapter: ")


def test_embeddings(run: Run, tmp_path: Path) -> None:
    save_text_encoder(tmp_path)
    scores = [float(line.split()[0]) for line in run("embeddings.py", "--model", tmp_path).splitlines()[-3:]]
    assert scores == sorted(scores, reverse=True) and all(-1 <= score <= 1.001 for score in scores)


def test_ray_data(run: Run, model: Path) -> None:
    try:
        import ray.data  # noqa: F401
    except ImportError:  # the test extra has ray without pyarrow and pandas
        with pytest.raises(SystemExit, match=r"Ray Data is missing: .* Run pip install 'ray\[data\]'"):
            run("ray_data.py", "--model", model)
    else:
        assert run("ray_data.py", "--model", model).count(" -> ") == 8


def test_client(run: Run, url: str) -> None:
    assert run("client.py", "--url", url).strip()


def test_tools(run: Run, url: str) -> None:
    assert run("tools.py", "--url", url).startswith("get_temperature('")


def test_batch(run: Run, url: str) -> None:
    printed = run("batch.py", "--url", url)
    assert {"france", "italy"} <= {line.partition(":")[0] for line in printed.splitlines()}
