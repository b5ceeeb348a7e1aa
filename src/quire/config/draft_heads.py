"""Heads that draft from the model's hidden states: EAGLE, EAGLE-3 and Medusa heads, and a checkpoint's own MTP layers.

A head's layers, tensor names and the model's layers that it reads are taken from its files once.
`speculators` configurations are translated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.facts import ModelFacts, read_facts
from quire.config.hf import read_json
from quire.config.speculative import DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, MTP, NAME, SpeculativeConfig
from quire.files.reading import reading
from quire.files.resolve import ModelFiles
from quire.files.safetensors import read_header
from quire.types.cache import LayerCache
from quire.types.errors import ConfigError

MTP_LAYERS = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")  # with MTP layers after the last layer
_NOT_BUILT = ("peagle", "dflash", "dspark", "mtp")  # of speculators
_MAX_DRAFTS = 64


@dataclass(frozen=True)
class DraftHead:
    method: str
    facts: ModelFacts  # `layers` are those with a cache, `vocab_size` is the model's
    names: frozenset[str] = frozenset()  # of its tensors, if there are files
    taps: tuple[int, ...] = ()  # layers of the model whose input it reads
    tokens: int | None = None  # drafts, if its configuration has the number
    most: int = _MAX_DRAFTS

    def has(self, *endings: str) -> bool:
        """Return whether there is a tensor whose name ends with one of these."""
        return any(name.endswith(endings) for name in self.names)


def find_method(requested: SpeculativeConfig, files: ModelFiles) -> str:
    """Return the speculation method of a draft model's files, if the user named none."""
    if files.format == "gguf":
        return DRAFT_MODEL
    config = read_json(files.path / "config.json", required=False)
    if isinstance(kind := config.get("speculators_model_type"), str):
        if kind in _NOT_BUILT:
            raise ConfigError(
                f"{NAME}.model {requested.model!r} is a speculator of the kind {kind!r}, which is not supported; {EAGLE3} is"
            )
        return EAGLE3 if kind == EAGLE3 else EAGLE if kind == EAGLE else kind
    named = " ".join(map(str, config.get("architectures") or ())).lower()
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return MEDUSA
    for text in (named, files.path.name.lower()):
        if "eagle3" in text:
            return EAGLE3
        if "eagle" in text:
            return EAGLE
    return DRAFT_MODEL


def read_head(requested: SpeculativeConfig, files: ModelFiles | None, facts: ModelFacts) -> DraftHead:
    """Return the head in `files`; None: the model's own MTP layers."""
    if requested.method == MTP:
        return _own_layers(facts)
    assert files is not None
    if files.format == "gguf":
        raise ConfigError(f"{NAME}.model {requested.model!r} is a GGUF file, and heads are read from safetensors")
    names = frozenset(name for path in files.weights for name in read_header(path))
    with reading(files.path, "the head's configuration cannot be used"):
        raw = _translate_speculator(read_json(files.path / "config.json"), requested)
        if requested.method == MEDUSA:
            return _medusa(requested, raw, files, facts, names)
        return _eagle(requested, raw, files, facts, names)


def _translate_speculator(raw: Mapping[str, Any], requested: SpeculativeConfig) -> dict[str, Any]:
    """Flatten a `speculators` configuration, which nests the fields of the layer."""
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        return dict(raw)
    kind = raw.get("speculators_model_type", requested.method)
    if kind != requested.method:
        raise ConfigError(
            f"{NAME}.method is {requested.method!r}, but {requested.model!r} is a speculator of the kind {kind!r}"
        )
    options = raw.get("speculators_config")
    methods = options.get("proposal_methods") if isinstance(options, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    outer = {key: value for key, value in raw.items() if key not in ("transformer_layer_config", "speculators_config")}
    outer.setdefault("norm_before_residual", kind == EAGLE3)
    return {**inner, **outer, "speculative_tokens": first.get("speculative_tokens"), "architectures": raw.get("architectures")}


def _eagle(
    requested: SpeculativeConfig, raw: dict[str, Any], files: ModelFiles, facts: ModelFacts, names: frozenset[str]
) -> DraftHead:
    filled = {
        **raw,
        "model_type": raw.get("model_type") if raw.get("model_type") in ("qwen2", "qwen3", "mistral") else "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": facts.vocab_size,
        "num_hidden_layers": raw.get("num_hidden_layers") or 1,
        "max_position_embeddings": raw.get("max_position_embeddings") or facts.max_position,
        "hidden_act": raw.get("hidden_act") or "silu",
        "sliding_window": None,
        "layer_types": None,
        "dtype": None,
        "torch_dtype": None,
        "quantization_config": None,
    }
    found = read_facts(files, filled)
    width = raw.get("target_hidden_size") or found.hidden_size
    if width != facts.hidden_size:
        raise ConfigError(
            f"{NAME}.model {requested.model!r} is for models with hidden_size {width}, but the model has "
            f"{facts.hidden_size}: it was made for another model"
        )
    if names and not any(name.removeprefix("model.") == "fc.weight" for name in names):
        raise ConfigError(
            f"{NAME}.model {requested.model!r} has no tensor 'fc.weight': it is not a head of the method {requested.method!r}"
        )
    taps = _taps(requested, raw, len(facts.layers)) if requested.method == EAGLE3 else ()
    return DraftHead(requested.method, found, names, taps, tokens=_count(raw.get("speculative_tokens")))


def _taps(requested: SpeculativeConfig, raw: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the layers of the model before which the hidden state is read."""
    inner = raw.get("eagle_config")
    options = inner if isinstance(inner, Mapping) else {}
    if options.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{NAME}.model {requested.model!r}: EAGLE-3 heads without states of several layers are not supported")
    layer_ids = raw.get("eagle_aux_hidden_state_layer_ids") or options.get("eagle_aux_hidden_state_layer_ids")
    taps = layer_ids if layer_ids is not None else [2, count // 2, count - 3]
    if not isinstance(taps, list) or not all(isinstance(tap, int) and 0 <= tap < count for tap in taps) or not taps:
        raise ConfigError(
            f"{NAME}.model {requested.model!r} reads states before the layers {taps}, and the model has layers 0 to {count - 1}"
        )
    return tuple(taps)


def _medusa(
    requested: SpeculativeConfig, raw: dict[str, Any], files: ModelFiles, facts: ModelFacts, names: frozenset[str]
) -> DraftHead:
    heads = _count(raw.get("medusa_num_heads") or raw.get("num_heads")) or 5
    width = raw.get("hidden_size") or facts.hidden_size
    if width != facts.hidden_size:
        raise ConfigError(
            f"{NAME}.model {requested.model!r} is for models with hidden_size {width}, but the model has "
            f"{facts.hidden_size}: it was made for another model"
        )
    own = replace(facts, files=files, hf=raw, layers=(), quantization=None, architecture="Medusa")
    return DraftHead(requested.method, own, names, tokens=heads, most=heads)


def _own_layers(facts: ModelFacts) -> DraftHead:
    count = _count(facts.hf.get("num_nextn_predict_layers")) or 0
    if facts.architecture not in MTP_LAYERS or not count:
        raise ConfigError(
            f"{NAME}.method {MTP!r}: {facts.architecture} has no supported MTP layers; "
            f"{' and '.join(MTP_LAYERS)} have them, if num_nextn_predict_layers is set"
        )
    first = len(facts.layers)
    names = (name for path in facts.files.weights for name in read_header(path))
    own = frozenset(name for name in names if name.startswith(f"model.layers.{first}."))
    if facts.files.weights and not own:
        raise ConfigError(f"{NAME}.method {MTP!r}: the checkpoint has no tensors of the MTP layer {first}")
    layer: LayerCache = facts.layers[-1]
    return DraftHead(MTP, replace(facts, layers=(layer,)), own, tokens=1)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_DRAFTS else None
