"""Read what sentence-transformers stores beside a checkpoint: the modules after the model, prompts and the longest text.

modules.json                        the modules, in order, each with its folder
1_Pooling/config.json               which token's hidden state the vector is, or their mean
2_Dense/config.json, weights        a linear layer after pooling, with an activation
3_Normalize                         the vector gets length 1
config_sentence_transformers.json   prompts, by name
sentence_bert_config.json           the longest text in tokens
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from quire.files.reading import read_bytes, shown
from quire.files.safetensors import read_header
from quire.types.errors import ModelError
from quire.types.json_text import read_json

Pooling = Literal["CLS", "MEAN", "LAST"]

MODULES, SETTINGS, LENGTHS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
MAX_CONFIG_BYTES = 1 << 20
METADATA, PROJECTION = "artifact.metadata", "linear.weight"
QUERY_TOKENS = 32  # of ColBERT's queries
_MARKERS = {"query": "[unused0]", "document": "[unused1]"}
_PYLATE = ("query_length", "document_length", "query_prefix", "document_prefix", "skiplist_words", "do_query_expansion",
           "attend_to_expansion_tokens")  # fmt: skip
DENSE_WEIGHTS = "model.safetensors"
ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid"}
_POOLINGS: Mapping[str, Pooling] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_OTHER_POOLINGS = ("max", "mean_sqrt_len", "weightedmean")
_MODE = "pooling_mode"


@dataclass(frozen=True)
class Dense:
    """A linear layer after pooling. `weights` has the tensors linear.weight [outputs, inputs] and, with bias, linear.bias."""

    weights: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str  # a value of ACTIVATIONS


@dataclass(frozen=True)
class LateInteraction:
    """How a model with a vector for each token reads queries and documents. Markers are the prompts of their names."""

    query_length: int | None = None  # tokens; longer texts are cut
    document_length: int | None = None
    fill: int = 0  # queries are filled up to this many tokens; 0: they are not
    cut: bool = True  # longer queries are cut to `fill`
    attended: bool = False  # tokens attend to those that fill a query
    filler: str | None = None  # the token; None: the mask token, or the end of text
    skipped_words: tuple[str, ...] = ()  # tokens without vectors
    skipped_roles: tuple[str, ...] = ("document",)


@dataclass(frozen=True)
class SentenceFiles:
    """The modules after the model. Without a pooling module every token has a vector (ColBERT)."""

    pooling: Pooling | None = None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    include_prompt: bool = True  # whether the tokens of a prompt enter the mean
    max_seq_length: int | None = None  # tokens, special ones included; longer texts are truncated by sentence-transformers
    lower_case: bool = False  # texts are lower-cased before they are tokenized
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)  # name -> text before an input
    default_prompt: str | None = None  # a name among `prompts`
    late: LateInteraction | None = None  # of models with a vector for each token
    similarity: str | None = None  # how vectors are compared: "cosine", "dot", ...


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """Return what sentence-transformers stores in a model's folder; None: modules.json is missing, so there is nothing."""
    path = folder / MODULES
    modules = _read(path)
    if modules is None:
        return None
    if not isinstance(modules, list) or not modules:
        raise ModelError(f"{path}: must be a list of modules, got {shown(modules)}")
    settings, lengths = _read_object(folder / SETTINGS), _read_object(folder / LENGTHS)
    found = _Modules(folder)
    for number, module in enumerate(modules):
        found.add(number, module, path)
    length = lengths.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{folder / LENGTHS}: max_seq_length must be a positive integer or null, got {shown(length)}")
    prompts, default = _read_prompts(settings, folder / SETTINGS)
    similarity = settings.get("similarity_fn_name")
    late, normalize = None, found.normalize
    if found.pooling is None:
        late = _read_late(settings, lengths, found.mask, folder / SETTINGS)
        normalize |= found.mask is None  # PyLate always does
        prompts = _with_markers(prompts, settings)
    return SentenceFiles(
        pooling=found.pooling,
        dense=tuple(found.dense),
        normalize=normalize,
        late=late,
        include_prompt=found.include_prompt,
        max_seq_length=length,
        lower_case=lengths.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt=default,
        similarity=similarity if isinstance(similarity, str) else None,
    )


def read_colbert_files(folder: Path, weights: Sequence[Path]) -> SentenceFiles:
    """Return what Stanford's ColBERT stores: the projection `linear.weight` beside the encoder's weights, and its settings."""
    path = next((path for path in weights if PROJECTION in read_header(path)), None)
    if path is None:
        raise ModelError(f"{folder}: the projection {PROJECTION} is missing in the weight files")
    outputs, inputs = read_header(path)[PROJECTION].shape
    settings = _read_object(folder / METADATA)
    punctuation = tuple(string.punctuation) if settings.get("mask_punctuation", True) else ()
    late = LateInteraction(
        document_length=_length(settings, "doc_maxlen", folder / METADATA),
        fill=_length(settings, "query_maxlen", folder / METADATA) or QUERY_TOKENS,
        attended=bool(settings.get("attend_to_mask_tokens")),
        skipped_words=punctuation,
    )
    markers = {"query": settings.get("query_token_id"), "document": settings.get("doc_token_id")}
    prompts = {name: str(markers[name] or default) for name, default in _MARKERS.items()}
    return SentenceFiles(dense=(Dense(path, inputs, outputs, False, "identity"),), normalize=True, prompts=prompts, late=late)


def _read_late(
    settings: Mapping[str, Any], transformer: Mapping[str, Any], mask: Mapping[str, Any] | None, where: Path
) -> LateInteraction:
    """settings: of the model, where PyLate stores them. transformer, mask: of modules, where sentence-transformers does."""
    known = {**settings, **{name: value for name, value in transformer.items() if value is not None}}
    pylate = any(name in settings for name in _PYLATE)
    query, document = (_length(known, name, where) for name in ("query_length", "document_length"))
    found = LateInteraction(query_length=query, document_length=document)
    expansion = known.get("query_expansion")
    if isinstance(expansion, Mapping):
        strategy, filler = expansion.get("strategy"), expansion.get("token")
        if strategy not in ("fixed", "min") or not (filler is None or isinstance(filler, str)):
            raise ModelError(f"{where}: query_expansion must have the strategy fixed or min, got {shown(expansion)}")
        fill = _length(expansion, "length", where) or QUERY_TOKENS
        found = replace(found, fill=fill, cut=strategy == "fixed", attended=expansion.get("attend") is True, filler=filler)
    elif "query_expansion" not in known and pylate and settings.get("do_query_expansion") is not False:
        attended = settings.get("attend_to_expansion_tokens") is True
        found = replace(found, fill=query or QUERY_TOKENS, attended=attended)
    words, roles = settings.get("skiplist_words"), ("document",)
    if mask is not None:
        words, given = mask.get("skiplist_words"), mask.get("skiplist_tasks")
        roles = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else roles
        if mask.get("keep_only_token_ids"):
            raise ModelError(f"{where.parent}: keep_only_token_ids is not supported; it is for images")
    elif words is None and pylate:
        words = list(string.punctuation)
    return replace(found, skipped_words=tuple(map(str, words or ())), skipped_roles=tuple(map(str, roles)))


def _with_markers(prompts: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the prompts of queries and documents with PyLate's markers before them."""
    found = {"query": "", "document": "", **prompts}
    for name in ("query", "document"):
        marker = settings.get(f"{name}_prefix")
        if isinstance(marker, str):
            found[name] = marker + found[name].removeprefix(marker)
    return found


def _length(config: Mapping[str, Any], name: str, where: Path) -> int | None:
    value = config.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ModelError(f"{where}: {name} must be a positive integer or null, got {shown(value)}")
    return value


class _Modules:
    """Takes the modules in order, and refuses an order or a kind that is not supported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pooling: Pooling | None = None
        self.include_prompt, self.normalize, self.dense = True, False, list[Dense]()
        self.mask: Mapping[str, Any] | None = None  # of MultiVectorMask

    def add(self, number: int, module: Any, where: Path) -> None:
        kind = module.get("type") if isinstance(module, Mapping) else None
        if not isinstance(kind, str) or not isinstance(module.get("path", ""), str):
            raise ModelError(f"{where}: a module must have a type and a path, got {shown(module)}")
        name, inner = kind.rpartition(".")[2], self._folder(module.get("path", ""), where)
        if (number == 0) != (name == "Transformer"):
            raise ModelError(f"{where}: the first module, and only that, must be a Transformer; module {number} is {kind}")
        if number == 0:
            if inner.resolve() != self.folder.resolve():
                raise ModelError(f"{where}: the Transformer must be in the model's folder, but its path is {module['path']!r}")
        elif self.normalize:
            raise ModelError(f"{where}: a module after Normalize is not supported; module {number} is {kind}")
        elif name == "Pooling" and not self.dense and self.pooling is None:
            self.pooling, self.include_prompt = _read_pooling(inner / "config.json")
        elif name == "Dense":
            self.dense.append(_read_dense(inner))
            self._check_size(where)
        elif name == "MultiVectorMask" and self.pooling is None:
            self.mask = _read_object(inner / "config.json")
        elif name == "Normalize":
            self.normalize = True
        else:
            raise ModelError(f"{where}: module {number} ({kind}) is not supported; one Pooling, then Dense and Normalize are")

    def _folder(self, path: str, where: Path) -> Path:
        inner = self.folder / path
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise ModelError(f"{where}: the path of a module must be inside the model's folder, got {path!r}")
        return inner

    def _check_size(self, where: Path) -> None:
        if len(self.dense) > 1 and self.dense[-2].outputs != self.dense[-1].inputs:
            raise ModelError(
                f"{where}: a Dense module has {self.dense[-1].inputs} inputs after {self.dense[-2].outputs} outputs"
            )


def _read_pooling(path: Path) -> tuple[Pooling, bool]:
    config = _read_object(path, required=True)
    new = config.get(_MODE)
    modes = {name for name in (*_POOLINGS, *_OTHER_POOLINGS) if config.get(f"{_MODE}_{name}{_suffix(name)}") is True}
    if new is not None:
        modes = {new} if isinstance(new, str) else set(map(str, new)) if isinstance(new, list | tuple) else {shown(new)}
    if len(modes) != 1:
        raise ModelError(f"{path}: one pooling mode must be set, got {', '.join(sorted(modes)) or 'none'}")
    [mode] = modes
    if mode not in _POOLINGS:
        raise ModelError(f"{path}: pooling mode {mode!r} is not supported; {', '.join(_POOLINGS)} are")
    return _POOLINGS[mode], config.get("include_prompt", True) is not False


def _suffix(mode: str) -> str:
    """What follows the mode in the name of its flag."""
    return {"cls": "_token", "mean": "_tokens", "max": "_tokens", "lasttoken": ""}.get(mode, "_tokens")


def _read_dense(folder: Path) -> Dense:
    path, weights = folder / "config.json", folder / DENSE_WEIGHTS
    config = _read_object(path, required=True)
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if type(inputs) is not int or type(outputs) is not int or inputs < 1 or outputs < 1:
        raise ModelError(
            f"{path}: in_features and out_features must be positive integers, got {shown(inputs)}, {shown(outputs)}"
        )
    bias, name = config.get("bias", True) is not False, config.get("activation_function", "Tanh")
    short = str(name).rpartition(".")[2]
    if short not in ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {shown(name)} is not supported; {', '.join(ACTIVATIONS)} are")
    if config.get("use_residual"):
        raise ModelError(f"{path}: use_residual is not supported")
    if not weights.is_file():
        raise ModelError(f"{weights}: is missing; pytorch_model.bin is not read. Save the module as safetensors")
    expected = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    shapes = {tensor: tuple(info.shape) for tensor, info in read_header(weights).items()}
    if shapes != expected:
        raise ModelError(f"{weights}: must have {expected}, got {shown(shapes)}")
    return Dense(weights, inputs, outputs, bias, ACTIVATIONS[short])


def _read_prompts(settings: Mapping[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of texts, got {shown(prompts)}")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{path}: default_prompt_name must be one of {', '.join(prompts) or 'no prompts'}; got {shown(default)}"
        )
    return dict(prompts), default


def _read_object(path: Path, *, required: bool = False) -> Mapping[str, Any]:
    value = _read(path)
    if value is None and not required:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{path}: must be a JSON object, {'and is missing' if value is None else f'got {shown(value)}'}")
    return value


def _read(path: Path) -> Any:
    """Return the JSON value in a file; None: there is no such file."""
    try:
        return read_json(read_bytes(path, MAX_CONFIG_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as JSON ({shown(str(error))})") from error
