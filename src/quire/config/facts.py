"""The facts of a model, read once from its files: shapes, cache layout, lengths, end tokens, weight sizes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from quire.config.families import card_of, family_of, has_chunked_attention
from quire.config.gguf import GGUF_NAMES, translate
from quire.config.hf import explicit_config, read_json, translate_params
from quire.config.layer_patterns import Kind, Layers
from quire.config.memory import estimate_parameters
from quire.config.quantization import Quantization, count_parameters, read_quantization
from quire.config.sanity_checks import MAX_LAYERS, invalid_fields
from quire.config.transformers_types import with_architecture
from quire.files.gguf import read_gguf_shards
from quire.files.reading import reading, shown
from quire.files.resolve import PARAMS, ModelFiles
from quire.files.safetensors import TensorInfo, read_header
from quire.types.cache import DTYPE_BYTES, LayerCache, StateCache
from quire.types.errors import ModelError

DEFAULT_MAX_POSITION = 4096  # of a model without a maximum length, unless max_model_len is set
_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {  # other names in older families
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "emb_dim"),
    "max_position": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "model_max_length",
    ),
    "vocab_size": ("vocab_size",),
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# their configs lack more than one field: the error gives the reason instead of the first missing name
_OWN_ATTENTION = "the paged cache does not support their kind of attention"
_STATE = "they have a recurrent state of a kind that is not supported"
_NOT_SERVED = {
    "rwkv": _STATE, "xlm": _OWN_ATTENTION, "flaubert": _OWN_ATTENTION, "xlnet": _OWN_ATTENTION,
}  # fmt: skip
_REFUSED = {"prophetnet": "their decoder attends to several streams of predicted tokens at once"}
# far above any model; larger numbers would otherwise only fail when memory is exhausted
_MAX = {"layers": MAX_LAYERS, "heads": 1 << 16, "kv_heads": 1 << 16, "head_dim": 1 << 16, "hidden_size": 1 << 24,
         "vocab_size": 1 << 28, "max_position": 1 << 30}  # fmt: skip


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model. `hf`: the text model's config with Hugging Face's names; GGUF metadata is translated."""

    architecture: str
    hf: Mapping[str, Any]
    dtype: str  # the checkpoint's: "float32", "float16" or "bfloat16"
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerCache, ...]  # one per attention layer, in order
    eos_ids: tuple[int, ...]
    bos_id: int | None
    generation: Mapping[str, Any]  # generation_config.json, or the sampling defaults of a built-in model
    weight_bytes: int  # as stored; 0 when there are no weight files
    parameters: int  # counted, or estimated from the shapes when there are no weight files
    files: ModelFiles
    quantization: Quantization | None = None  # of safetensors
    kinds: tuple[Kind, ...] = ()  # of all layers, if some are recurrent
    states: tuple[StateCache, ...] = ()  # one per recurrent layer, in order
    unsupported_reason: str = (
        ""  # why there are no `layers`: the configuration does not determine them, only the model's code does
    )
    by_transformers: bool = False  # transformers runs it
    widths: int = 0  # rows and columns of all its matrices together, as stored; 0 when there are no weight files
    matrices: int = 0  # as stored, each expert counted; 0 when there are no weight files
    encoder: bool = (
        False  # encoder-only: bidirectional attention without a KV cache; it has no `layers` and generates no tokens
    )
    recomputed: str = ""  # why its cache has tokens only, and every step computes whole sequences

    @property
    def depth(self) -> int:
        """Return the number of layers that pipeline stages divide."""
        return len(self.kinds) or len(self.layers)

    @property
    def without_pages(self) -> bool:
        """Whether the model may have no layer with a KV cache."""
        return bool(self.states) or self.encoder


@dataclass(frozen=True)
class DeviceFacts:
    """A device and the settings that suit it, from `device/base.py`; torch is not imported here."""

    kind: str  # its name in `device`
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    batch: tuple[int, int] = (1024 + 64, 64)  # tokens and requests per step: 1,024 prompt tokens and one token of each request
    served_tokens: int | None = None  # maximum per step when serving; None: as in `batch`
    times_steps: bool = True  # step times are measured when serving; otherwise estimated from sizes
    dtype: str | None = "float32"  # the default; None: the checkpoint's, if it has 16 bits
    page_size: int = 16  # tokens
    # quantized layouts (`ops/quantized_layouts.py`) it multiplies by; "experts": those of experts, too; "blocks": GGUF blocks
    keeps: frozenset[str] = frozenset()
    always_keeps: bool = False  # for any dtype, which is then that of activations
    quantized_page_size: int = 16  # tokens, with quantized weights
    advice: str = ""  # for users whose quantized weights are dequantized, if they can change that
    overlaps: bool = False  # a step runs while the host plans the next one
    single_rows_share: bool = False  # other rows of a step may read keys that a decode row writes
    reads_in_place: bool = False  # contiguous keys of a sequence are faster
    one_memory: bool = False  # engines on one machine share it
    count: int = 0  # visible devices of this kind; 0: unknown
    batch_dependence: str = "this device"  # as `Prepared.batch_dependence`, known before the model is loaded
    kernels: str = ""  # instructions, kernels and library versions that bits depend on, for `system_fingerprint`
    packs_floats: bool = False  # it multiplies by packed copies of float32 matrices; with adapters it also needs the originals


def count_heads(facts: ModelFacts) -> int:
    """Return the query heads; 1 if the configuration does not have them."""
    return next((int(facts.hf[name]) for name in _NAMES["heads"] if facts.hf.get(name) is not None), 1)


def count_experts(facts: ModelFacts) -> int:
    """Return the experts of a layer; 0: none."""
    counts = (facts.hf.get(name) for name in EXPERT_COUNTS)
    return next((count for count in counts if isinstance(count, int) and count > 0), 0)


def sizes_of(facts: ModelFacts) -> dict[str, int]:
    """Return the sizes that determine step times, from the configuration; 0: unknown."""
    heads = {(layer.kv_heads, layer.head_dim) for layer in facts.layers}
    return {
        "layers": int(facts.hf["num_hidden_layers"]) if facts.encoder else len(facts.layers) + len(facts.states),
        "hidden_size": facts.hidden_size,
        "intermediate_size": width if isinstance(width := facts.hf.get("intermediate_size"), int) else 0,
        "heads": count_heads(facts),
        "kv_heads": max((count for count, _ in heads), default=0),
        "head_dim": max((size for _, size in heads), default=0),
        "experts": count_experts(facts),
        "vocab_size": facts.vocab_size,
    }


class _UnknownCache(ModelError):
    """An architecture whose cache layout does not follow from its configuration."""


def read_facts(files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None, *, lenient: bool = False) -> ModelFacts:
    """Read a model's facts from its files.

    lenient: where the configuration does not say what the cache holds, return no layers and an `unsupported_reason`.
    """
    with reading(files.path, "the model's configuration cannot be used"):
        return _read_facts(files, hf_overrides or {}, lenient)


def _read_facts(files: ModelFiles, overrides: Mapping[str, Any], lenient: bool) -> ModelFacts:
    dtypes, infos = dict[str, int](), dict[str, TensorInfo]()
    if files.format == "gguf":
        headers = read_gguf_shards(files.weights)
        raw, generation = translate(headers), dict(files.sampling)
        tensors = [tensor for header in headers for tensor in header.tensors.values()]
        stored, counted = sum(tensor.nbytes for tensor in tensors), sum(tensor.elements for tensor in tensors)
        shapes = [tensor.shape for tensor in tensors]
    else:
        mistral = files.format == "mistral"
        raw = translate_params(read_json(files.path / PARAMS)) if mistral else read_json(files.path / "config.json")
        generation = read_json(files.path / "generation_config.json", required=False)
        infos = {name: info for path in files.weights for name, info in read_header(path).items()}
        stored, counted = sum(info.nbytes for info in infos.values()), sum(info.elements for info in infos.values())
        shapes = [info.shape for info in infos.values()]
        for info in infos.values():
            dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.elements
    try:
        config = explicit_config(with_architecture(raw), overrides)
    except ModelError as error:
        raise ModelError(f"{files.name}: {error}") from error
    if infos and isinstance(raw.get("text_config"), Mapping):  # versions differ in which of the two configs has it
        config["tie_word_embeddings"] = not any(name.endswith("lm_head.weight") for name in infos)
    reader = _Reader(files.name, config, GGUF_NAMES if files.format == "gguf" else {})
    reader.check_values()
    try:
        reader.refuse_unsupported()
        recurrent, unsupported_reason = reader.recurrent(), ""
        encoder = reader.is_encoder()
        layers = () if encoder else reader.layers() if recurrent is None else reader.uniform(recurrent.attentions)
        reader.check_length()
    except _UnknownCache as error:
        if not lenient:
            raise
        recurrent, layers, unsupported_reason, encoder = None, (), str(error), False
    quantization = _quantization(files, config)
    if quantization is not None and infos:
        counted = count_parameters(infos, quantization)
    return ModelFacts(
        architecture=reader.architecture(),
        hf=config,
        dtype=reader.dtype(dtypes),
        vocab_size=reader.size("vocab_size"),
        hidden_size=reader.size("hidden_size"),
        max_position=reader.max_position(unbounded=bool(unsupported_reason)),
        layers=layers,
        eos_ids=reader.ids("eos_token_id", config, generation),
        bos_id=next(iter(reader.ids("bos_token_id", config, generation)), None),
        generation=generation,
        weight_bytes=stored,
        parameters=counted or estimate_parameters(config),
        files=files,
        quantization=quantization,
        kinds=() if recurrent is None else recurrent.kinds,
        states=() if recurrent is None else recurrent.states,
        unsupported_reason=unsupported_reason,
        widths=_add_widths(shapes),
        matrices=sum(prod(shape[:-2]) for shape in shapes),
        encoder=encoder,
    )


def _add_widths(shapes: Iterable[Sequence[int]]) -> int:
    return sum(prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)


def _quantization(files: ModelFiles, config: Mapping[str, Any]) -> Quantization | None:
    if files.format == "gguf":
        return None
    try:
        return read_quantization(config, files.path)
    except ModelError as error:
        raise ModelError(f"{files.name}: {error}") from error


class _Reader:
    """Reads fields of a config, with errors that name the missing or wrong field."""

    def __init__(self, name: str, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.name = name
        self.config = config
        self.names = names  # names of fields in the file, if they differ

    def architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self._wrong("architectures", "a list with the model class, such as ['LlamaForCausalLM']")
        return str(names[0])

    def refuse_unsupported(self) -> None:
        if self.config.get("is_encoder_decoder"):
            raise ModelError(f"{self.name}: encoder-decoder models are not supported; only decoders are")
        if (why := _REFUSED.get(str(self.config.get("model_type")))) is not None:
            raise ModelError(f"{self.name}: {self.config['model_type']} models are not supported: {why}")
        if (why := _NOT_SERVED.get(str(self.config.get("model_type")))) is not None:
            raise _UnknownCache(f"{self.name}: {self.config['model_type']} models are not supported: {why}")
        if not self._has_recurrent_layers() and not any(name in self.config for name in _NAMES["heads"]):
            raise _UnknownCache(
                f"{self.name}: the model's config has none of {', '.join(_NAMES['heads'])}; only models with attention "
                "under these names are supported"
            )
        if self.config.get("kv_lora_rank") and self.config.get("index_topk"):
            raise _UnknownCache(
                f"{self.name}: sparse attention by an indexer (index_topk) is not supported; latent attention without one is"
            )

    def check_length(self) -> None:
        if all(self.config.get(name) is None for name in _NAMES["max_position"]):
            raise _UnknownCache(str(self._wrong("max_position_embeddings", "a positive integer")))

    def check_values(self) -> None:
        for wrong in invalid_fields(self.config):
            raise self._wrong(*wrong)

    def dtype(self, stored: Mapping[str, int]) -> str:
        name = self.config.get("dtype") or self.config.get("torch_dtype")
        if name is None and stored:
            name = _SAFETENSORS_DTYPES.get(max(stored, key=lambda dtype: stored[dtype]))
        name = str(name or "float32").removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise self._wrong("dtype", f"one of {', '.join(DTYPE_BYTES)}")
        return name

    def size(self, what: str, default: int | None = None, least: int = 1) -> int:
        """Return a positive integer under any of its names."""
        for key in _NAMES.get(what, (what,)):
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self._wrong(key, "a positive integer")
            if value > _MAX.get(what, 1 << 62):
                raise self._wrong(key, f"at most {_MAX.get(what, 1 << 62):,}")
            return value
        if default is None:
            raise self._wrong(_NAMES.get(what, (what,))[0], "a positive integer")
        return default

    def _has_recurrent_layers(self) -> bool:
        card = card_of(self.config)
        return card is not None and card.layers is not None

    def is_encoder(self) -> bool:
        """Whether the class that the file names runs without a KV cache. Other classes of the same type may be decoders."""
        card = family_of(self.architecture(), self.config)
        if card is not None and card.kind == "encoder" and self.config.get("is_decoder"):
            raise ModelError(f"{self.name}: is_decoder true is not supported for {self.architecture()}, which is an encoder")
        return card is not None and card.kind == "encoder"

    def recurrent(self) -> Layers | None:
        try:
            card = card_of(self.config)
            return None if card is None or card.layers is None else card.layers(self.config)
        except ModelError as error:
            raise ModelError(f"{self.name}: {error}") from error

    def uniform(self, count: int) -> tuple[LayerCache, ...]:
        """Return `count` equal layers with full attention."""
        return (self._latent() or self._layer(None),) * count if count else ()

    def layers(self) -> tuple[LayerCache, ...]:
        if (latent := self._latent()) is not None:
            return (latent,) * self.size("layers")
        windows = self._windows(self.size("layers"))
        shapes = self.config.get("layer_shapes")
        found = map(self._layer, windows) if shapes is None else map(self._shaped, shapes, windows)
        layers = tuple(layer for layer in found if layer is not None)
        return layers[: len(layers) - self.size("num_kv_shared_layers", default=0, least=0)]

    def _shaped(self, shape: tuple[Any, Any] | None, window: int | None) -> LayerCache | None:
        """Return a layer with its own (key heads, head size); None: the layer has no attention."""
        if shape is None:
            return None
        own = _Reader(self.name, {**self.config, "num_key_value_heads": shape[0], "head_dim": shape[1]}, self.names)
        return own._layer(window)

    def _latent(self) -> LayerCache | None:
        if not self.config.get("kv_lora_rank"):
            return None
        rank, _ = self.size("kv_lora_rank"), self.size("heads", default=1)
        return LayerCache(1, rank + self.size("qk_rope_head_dim"), latent=rank)

    def _layer(self, window: int | None) -> LayerCache:
        heads = self.size("heads")
        kv_heads = self.size("kv_heads", default=1 if self.config.get("multi_query") else heads)
        head_dim = self.size("head_dim", default=max(1, self.size("hidden_size") // heads))
        if heads % kv_heads:
            raise self._wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        return LayerCache(kv_heads, head_dim, window)

    def _windows(self, count: int) -> list[int | None]:
        """Return the attention window of each layer; None: full attention."""
        config = self.config
        window = self.size("sliding_window", default=0) or None
        if not config.get("use_sliding_window", True):
            window = None
        if config.get("layer_types") is not None:
            return self._windows_of_types(config["layer_types"], count, window)
        if window is None:
            return [None] * count
        if pattern := self.size("sliding_window_pattern", default=0):  # every pattern-th layer is full
            return [None if (index + 1) % pattern == 0 else window for index in range(count)]
        if (card := card_of(config)) is not None and card.first_layers_full:
            first = self.size("max_window_layers", default=count, least=0)
            return [None if index < first else window for index in range(count)]
        return [window] * count

    def _windows_of_types(self, types: Any, count: int, window: int | None) -> list[int | None]:
        if not isinstance(types, list) or len(types) != count:
            raise self._wrong("layer_types", f"a list of {count} layer types")
        known = {"full_attention": None, "sliding_attention": window}
        if "chunked_attention" in types and has_chunked_attention(self.config):
            known["chunked_attention"] = self.size("attention_chunk_size")  # attention stays within a chunk
        for kind in types:
            if kind not in known:
                raise _UnknownCache(f"{self.name}: layers of type {kind!r} are not supported; {' and '.join(known)} are")
        if "sliding_attention" in types and window is None:
            raise self._wrong("sliding_window", "a positive integer, since layer_types has sliding_attention")
        return [known[kind] for kind in types]

    def max_position(self, unbounded: bool = False) -> int:
        """Return the maximum context of the position encoding.

        max_position_embeddings already is the stretched length in llama3, longrope and Gemma 3 checkpoints. With yarn it may be
        either, so the original length times the factor decides. With linear and dynamic scaling it is the original.
        """
        length = self.size("max_position", default=DEFAULT_MAX_POSITION if unbounded else None)
        rope = self.config.get("rope_parameters")
        if not isinstance(rope, Mapping) or "full_attention" in rope:
            return length
        factor, kind = rope.get("factor"), rope.get("rope_type")
        if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
            return length
        original = rope.get("original_max_position_embeddings")
        stretched = max(length, original * factor) if isinstance(original, int) else length * factor
        if not 1 <= stretched <= _MAX["max_position"]:
            raise self._wrong(
                "factor", f"one that stretches {length} positions to 1 at least, {_MAX['max_position']:,} at most", factor
            )
        return int(stretched)

    def ids(self, key: str, *configs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token ids under `key` in all configs: one, several or none in each."""
        found: list[int] = []
        for config in configs:
            value = config.get(key)
            values = value if isinstance(value, list) else [] if value is None else [value]
            if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
                raise self._wrong(key, "a token id or a list of token ids")
            found += values
        return tuple(dict.fromkeys(found))

    def _wrong(self, key: str, right: str, value: Any = None, where: str = "in the model's config") -> ModelError:
        """Return the error of a wrong field. `value`: of a nested field."""
        if value is None and key not in self.config:
            return ModelError(f"{self.name}: the model's config lacks {key!r}; it must be {right}")
        if key in self.names:
            where = f"(in the file: {self.names[key]})"
        return ModelError(
            f"{self.name}: {key} {where} must be {right}, got {shown(self.config[key] if value is None else value)}"
        )
