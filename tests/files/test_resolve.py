import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from gguf_files import write_gguf
from quire.files.resolve import ModelFiles, is_bare_name, resolve_model, with_weights_on_disk
from quire.types.errors import ModelError, ModelNotFound


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_directory_with_one_weight_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").touch()
    (checkpoint / "consolidated.safetensors").touch()
    files = resolve_model(str(checkpoint))
    assert files == ModelFiles(str(checkpoint), checkpoint, "hf", (checkpoint / "model.safetensors",))
    assert resolve_model(checkpoint, weights=False).weights == ()


def test_the_index_decides_which_files_count(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "one.safetensors"}}))
    (checkpoint / "one.safetensors").touch()
    with pytest.raises(ModelError, match=r"1 of 2 weight files .* two\.safetensors"):
        resolve_model(str(checkpoint))
    assert with_weights_on_disk(resolve_model(str(checkpoint), weights=False)).weights == ()
    (checkpoint / "two.safetensors").touch()
    (checkpoint / "stray.safetensors").touch()
    assert [path.name for path in resolve_model(str(checkpoint)).weights] == ["one.safetensors", "two.safetensors"]
    assert len(with_weights_on_disk(resolve_model(str(checkpoint), weights=False)).weights) == 2
    index.write_text("[]")
    with pytest.raises(ModelError, match="must be a JSON object"):
        resolve_model(str(checkpoint))


def test_pickled_weights_are_refused_with_a_way_out(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"only safetensors and GGUF are read.*save_pretrained"):
        resolve_model(str(checkpoint))


def test_directories_that_hold_no_model(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        resolve_model(str(checkpoint))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        resolve_model(str(tmp_path / "empty"))


def test_gguf_files(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").touch()
    assert resolve_model(str(file)) == ModelFiles(str(file), file, "gguf", (file,))
    assert resolve_model(str(tmp_path)).weights == (file,)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF models.*m\.gguf, other\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.txt").touch()
    with pytest.raises(ModelError, match=r"must be a \.gguf file"):
        resolve_model(str(tmp_path / "m.txt"))


def test_gguf_shards(tmp_path: Path) -> None:
    shards = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for shard in shards[:2]:
        shard.touch()
    with pytest.raises(ModelError, match=r"1 of 3 GGUF shards are missing: m-00003-of-00003\.gguf"):
        resolve_model(str(shards[0]))
    shards[2].touch()
    for name in (shards[0], shards[1], tmp_path):
        files = resolve_model(str(name))
        assert files.path == shards[0]
        assert files.weights == tuple(shards)


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/at/all", "~/nothing-of-the-kind", "nothing.gguf", "a/b/c", "../nothing-of-the-kind", "b c"]
)
def test_paths_that_do_not_exist_are_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or directory"):
        resolve_model(name)


def test_empty_name() -> None:
    with pytest.raises(ModelNotFound, match="empty"):
        resolve_model("")


class FakeHub:
    """Stands for snapshot_download: fills a snapshot directory, or fails."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.error: Exception | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, repo: str, **options: Any) -> str:
        self.calls.append((repo, options))
        if self.error is not None:
            raise self.error
        return str(self.snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.chdir(tmp_path)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    fake = FakeHub(snapshot)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_hub_snapshot(hub: FakeHub) -> None:
    (hub.snapshot / "config.json").write_text("{}")
    (hub.snapshot / "model.safetensors").touch()
    files = resolve_model("org/name", revision="v1", download_dir="here", token="secret")
    assert files.name == "org/name"
    assert files.weights == (hub.snapshot / "model.safetensors",)
    repo, options = hub.calls[0]
    assert (repo, options["revision"], options["cache_dir"], options["token"]) == ("org/name", "v1", "here", "secret")
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(".bin" in pattern or ".pth" in pattern for pattern in options["allow_patterns"])
    resolve_model("org/name", weights=False)
    assert "*.safetensors" not in hub.calls[1][1]["allow_patterns"]


def test_hub_model_without_safetensors(hub: FakeHub) -> None:
    (hub.snapshot / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="org/name:Q4_K_M"):
        resolve_model("org/name")


def test_gguf_file_of_a_hub_repository(hub: FakeHub) -> None:
    (hub.snapshot / "m-Q4_K_M.gguf").touch()
    (hub.snapshot / "m-Q4_K_S.gguf").touch()
    assert resolve_model("org/name:q4_k_m").path == hub.snapshot / "m-Q4_K_M.gguf"
    assert resolve_model("org/name/m-Q4_K_S.gguf").path == hub.snapshot / "m-Q4_K_S.gguf"
    with pytest.raises(ModelNotFound, match="quantization 'Q4_K'"):
        resolve_model("org/name:Q4_K")
    with pytest.raises(ModelNotFound, match="no file"):
        resolve_model("org/name/m-Q8_0.gguf")


def _http(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("the hub said no",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_http(errors.RepositoryNotFoundError), "has no model 'org/name' that you may read"),
        (_http(errors.GatedRepoError), "gated.*HF_TOKEN"),
        (_http(errors.RevisionNotFoundError), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached.*HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled("x"), "cannot be reached.*HF_HUB_OFFLINE"),
        (errors.HFValidationError("x"), "valid hub id"),
    ],
)
def test_hub_failures_say_what_to_do(hub: FakeHub, error: Exception, message: str) -> None:
    hub.error = error
    with pytest.raises(ModelNotFound, match=message) as caught:
        resolve_model("org/name", revision="v9")
    assert "no directory 'org/name' here" in str(caught.value)


def test_a_typo_of_an_alias_is_recognized(hub: FakeHub) -> None:
    hub.error = errors.LocalEntryNotFoundError("x")
    with pytest.raises(ModelNotFound, match="Did you mean 'smollm2'"):
        resolve_model("smollm")


@pytest.mark.parametrize(
    ("name", "bare"),
    [("gpt2", True), ("smollm2", False), ("org/name", False), ("./x", False), ("x.gguf", False)],
)
def test_a_name_without_an_organisation(name, bare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_bare_name(name) is bare
    (tmp_path / "gpt2").mkdir()
    assert not is_bare_name("gpt2")
