"""Heads that draft from what the model itself computes: EAGLE, EAGLE-3 and Medusa heads, and a checkpoint's own MTP layers.

What a head is, is read once from its files: its layers, its tensors' names, and which of the model's layers it listens to.
`speculators` configurations say the same in other words.
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

MTP_LAYERS = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")  # whose layers behind the last are for drafts
_NOT_BUILT = ("peagle", "dflash", "dspark", "mtp")  # of speculators
_MANY = 64


@dataclass(frozen=True)
class DraftHead:
    method: str
    facts: ModelFacts  # its files and configuration; `layers` are those with a cache, `vocab_size` is the model's
    names: frozenset[str] = frozenset()  # of its tensors, where there are files
    taps: tuple[int, ...] = ()  # layers of the model whose inputs it reads
    tokens: int | None = None  # that it drafts, where it says so
    most: int = _MANY

    def has(self, *endings: str) -> bool:
        """Is there a tensor whose name ends so?"""
        return any(name.endswith(endings) for name in self.names)


def find_method(asked: SpeculativeConfig, files: ModelFiles) -> str:
    """Return the speculation method of a draft model's files, where the user named none."""
    if files.format == "gguf":
        return DRAFT_MODEL
    config = read_json(files.path / "config.json", required=False)
    if isinstance(kind := config.get("speculators_model_type"), str):
        if kind in _NOT_BUILT:
            raise ConfigError(
                f"{NAME}.model {asked.model!r} is a speculator of the kind {kind!r}, which is not built; {EAGLE3} is"
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


def read_head(asked: SpeculativeConfig, files: ModelFiles | None, facts: ModelFacts) -> DraftHead:
    """`files`: of the head; None = the model's own layers."""
    if asked.method == MTP:
        return _own_layers(facts)
    assert files is not None
    if files.format == "gguf":
        raise ConfigError(f"{NAME}.model {asked.model!r} is a GGUF file, and heads are read from safetensors")
    names = frozenset(name for path in files.weights for name in read_header(path))
    with reading(files.path, "the head's configuration cannot be used"):
        raw = _plain_words(read_json(files.path / "config.json"), asked)
        if asked.method == MEDUSA:
            return _medusa(asked, raw, files, facts, names)
        return _eagle(asked, raw, files, facts, names)


def _plain_words(raw: Mapping[str, Any], asked: SpeculativeConfig) -> dict[str, Any]:
    """A `speculators` configuration as others are written: the layer's own fields beside the head's."""
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        return dict(raw)
    kind = raw.get("speculators_model_type", asked.method)
    if kind != asked.method:
        raise ConfigError(f"{NAME}.method is {asked.method!r}, but {asked.model!r} is a speculator of the kind {kind!r}")
    told = raw.get("speculators_config")
    methods = told.get("proposal_methods") if isinstance(told, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    outer = {key: value for key, value in raw.items() if key not in ("transformer_layer_config", "speculators_config")}
    outer.setdefault("norm_before_residual", kind == EAGLE3)
    return {**inner, **outer, "speculative_tokens": first.get("speculative_tokens"), "architectures": raw.get("architectures")}


def _eagle(
    asked: SpeculativeConfig, raw: dict[str, Any], files: ModelFiles, facts: ModelFacts, names: frozenset[str]
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
    wanted = raw.get("target_hidden_size") or found.hidden_size
    if wanted != facts.hidden_size:
        raise ConfigError(
            f"{NAME}.model {asked.model!r} is for models with states of {wanted} numbers, and this one's have "
            f"{facts.hidden_size}: it was made for another model"
        )
    if names and not any(name.removeprefix("model.") == "fc.weight" for name in names):
        raise ConfigError(
            f"{NAME}.model {asked.model!r} has no tensor 'fc.weight': it is no head of the method {asked.method!r}"
        )
    taps = _taps(asked, raw, len(facts.layers)) if asked.method == EAGLE3 else ()
    return DraftHead(asked.method, found, names, taps, tokens=_count(raw.get("speculative_tokens")))


def _taps(asked: SpeculativeConfig, raw: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Each is the number of the model's layers behind which the state is read."""
    inner = raw.get("eagle_config")
    options = inner if isinstance(inner, Mapping) else {}
    if options.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{NAME}.model {asked.model!r}: EAGLE-3 heads without states of several layers are not built")
    told = raw.get("eagle_aux_hidden_state_layer_ids") or options.get("eagle_aux_hidden_state_layer_ids")
    taps = told if told is not None else [2, count // 2, count - 3]
    if not isinstance(taps, list) or not all(isinstance(tap, int) and 0 <= tap < count for tap in taps) or not taps:
        raise ConfigError(
            f"{NAME}.model {asked.model!r} reads states before the layers {taps}, and the model has layers 0 to {count - 1}"
        )
    return tuple(taps)


def _medusa(
    asked: SpeculativeConfig, raw: dict[str, Any], files: ModelFiles, facts: ModelFacts, names: frozenset[str]
) -> DraftHead:
    heads = _count(raw.get("medusa_num_heads") or raw.get("num_heads")) or 5
    wanted = raw.get("hidden_size") or facts.hidden_size
    if wanted != facts.hidden_size:
        raise ConfigError(
            f"{NAME}.model {asked.model!r} is for models with states of {wanted} numbers, and this one's have "
            f"{facts.hidden_size}: it was made for another model"
        )
    own = replace(facts, files=files, hf=raw, layers=(), quantization=None, architecture="Medusa")
    return DraftHead(asked.method, own, names, tokens=heads, most=heads)


def _own_layers(facts: ModelFacts) -> DraftHead:
    count = _count(facts.hf.get("num_nextn_predict_layers")) or 0
    if facts.architecture not in MTP_LAYERS or not count:
        raise ConfigError(
            f"{NAME}.method {MTP!r}: {facts.architecture} has no layers for drafts that are read here; "
            f"of {' and '.join(MTP_LAYERS)} they are, where num_nextn_predict_layers says that there are some"
        )
    first = len(facts.layers)
    names = (name for path in facts.files.weights for name in read_header(path))
    own = frozenset(name for name in names if name.startswith(f"model.layers.{first}."))
    if facts.files.weights and not own:
        raise ConfigError(f"{NAME}.method {MTP!r}: the checkpoint has no tensors of layer {first}, which would draft")
    layer: LayerCache = facts.layers[-1]
    return DraftHead(MTP, replace(facts, layers=(layer,)), own, tokens=1)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MANY else None
