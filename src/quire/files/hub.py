"""Fetching a checkpoint from the Hugging Face hub, or from its local cache when there is no network.

Only files that Quire reads are asked for. Every way in which this can fail is told in one sentence with a way out.
"""

from pathlib import Path

from quire.progress import doing, set_aside
from quire.types.errors import ModelError, ModelNotFound

TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # configs, tokenizers, chat templates, the weight index
WEIGHT_FILES = ["*.safetensors"]
NEVER = ["*/*.safetensors", "consolidated*", "original/*", "onnx/*", "*.onnx*", "training_args*"]


def fetch_snapshot(
    repo: str, *, revision: str | None, download_dir: str | None, token: str | bool | None, weights: bool, mistral: bool = False
) -> Path:
    """The snapshot directory of a hub repository in the format of `transformers`, or of Mistral."""
    patterns = TEXT_FILES
    if weights:
        patterns = TEXT_FILES + (["consolidated*.safetensors"] if mistral else WEIGHT_FILES)
    return _download(repo, patterns, revision, download_dir, token, [] if mistral else NEVER)


def fetch_gguf(repo: str, file: str, *, revision: str | None, download_dir: str | None, token: str | bool | None) -> Path:
    """One GGUF file of a hub repository, with its sibling shards when it is one of several."""
    from quire.files.safetensors import shard_pattern

    snapshot = _download(repo, [shard_pattern(file)], revision, download_dir, token)
    path = snapshot / file
    if not path.is_file():
        raise ModelNotFound(f"the hub repository {repo!r} has no file {file!r}")
    return path


def fetch_gguf_quant(
    repo: str, quant: str, *, revision: str | None, download_dir: str | None, token: str | bool | None
) -> Path:
    """The GGUF file of a hub repository whose name carries this quantization ("Q4_K_M")."""
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
    never: list[str] = NEVER,
) -> Path:
    with doing(f"fetching {repo} from the hub"), set_aside():  # which shows bars of its own
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
    return Path(path)
