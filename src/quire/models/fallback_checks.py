"""Find out whether a transformers model can be run over our KV cache, with our attention as an attention function.

transformers looks attention functions up by name. Ours calls the handler that is installed on the calling module, so that one
process can hold many models. In doubt a model is refused.

    WATCHED   the attention function receives a description of the mask (`Mask`) instead of the mask
    SERVED    no mask is made
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from quire.attn.backend import AttentionSpec
from quire.files.reading import error_summary
from quire.layers.rope import dynamic_growth
from quire.types.cache import LayerCache
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

transformers: Any = importlib.import_module("transformers")

WATCHED, SERVED = "quire-watched", "quire"


class Recomputable(ModelError):
    """A model does not fit our KV cache, but may be recomputed without it."""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars of transformers: ours is shown."""
    log = transformers.utils.logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


class Handler(Protocol):
    """Replaces the attention of the modules that it is installed on."""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:
        """query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim]."""
        ...


@dataclass(frozen=True)
class Mask:
    """A mask. `window`: positions that a query sees, including its own; None: all before it."""

    window: int | None
    causal: bool = True  # False: not a causal mask with or without a sliding window

    def __getattr__(self, name: str) -> Any:
        raise Recomputable("it computes with its attention mask instead of passing it on")

    def __getitem__(self, index: Any) -> Any:
        raise Recomputable("it slices its attention mask instead of passing it on")

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise Recomputable("it computes with its attention mask instead of passing it on")


def install(handler: Handler, module: nn.Module) -> None:
    """Install `handler` as the attention of `module`, without registering it as a child module."""
    object.__setattr__(module, "quire_attention", handler)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    handler: Handler = module.quire_attention  # type: ignore[assignment]
    return handler(module, query, key, value, {**options, "attention_mask": attention_mask}), None


def _describe_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Mask:
    """Describe a mask by evaluating its function at positions around the window's edge; an error means it is not causal."""
    edge = local_size or 16
    points = sorted({0, 1, 2, 3, *(edge * times + step for times in (1, 2, 3) for step in (-1, 0, 1))})
    at = torch.tensor(points, device="cpu")
    query, key, zero = at.unsqueeze(1), at.unsqueeze(0), torch.tensor(0, device="cpu")
    expected = key <= query
    if local_size is not None:
        expected &= key > query - local_size
    try:
        got = torch.as_tensor(mask_function(zero, zero, query, key), device="cpu").expand_as(expected)
    except Exception:
        return Mask(local_size, causal=False)
    return Mask(local_size, causal=torch.equal(got, expected))


for _name in (WATCHED, SERVED):
    transformers.AttentionInterface.register(_name, _attend)
transformers.AttentionMaskInterface.register(WATCHED, _describe_mask)


def find_class(facts: "ModelFacts") -> tuple[Any, Any]:
    """Return transformers' config and class of the model."""
    kind = facts.hf.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        if facts.hf.get("auto_map"):
            raise ModelError("it needs code from its own repository, which is never run")
        raise ModelError(f"transformers {transformers.__version__} does not know the model_type {kind!r}")
    try:
        settings = {name: value for name, value in facts.hf.items() if name != "quantization_config"}  # not quantized here
        config = transformers.CONFIG_MAPPING[kind].from_dict(settings)
        settle_rope(config, facts.max_position)
    except Exception as error:
        raise ModelError(f"transformers does not accept its configuration ({error_summary(error)})") from error
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    found = classes.get(type(config), None)
    named = getattr(transformers, facts.architecture, None)
    if found is None and named is not None and type(config) is named.config_class and named.can_generate():
        found = named  # for instance the text model of a multimodal one
    if found is None or found.__name__ != facts.architecture:
        served = f"; for {kind} that is {found.__name__}" if found is not None else ""
        raise ModelError(f"it is not a causal language model of transformers {transformers.__version__}{served}")
    return config, found


def settle_rope(config: Any, longest: int) -> None:
    """Replace rope that depends on the length of the text by that of `quire.layers.rope`: keys are cached after rotation."""
    rope = getattr(config, "rope_parameters", None) or {}
    trained = getattr(config, "max_position_embeddings", longest)
    for settings in (rope, *rope.values()):
        kind = settings.get("rope_type") if isinstance(settings, dict) else None
        if kind == "longrope":
            stated = settings.get("original_max_position_embeddings")
            if longest > (stated or getattr(config, "original_max_position_embeddings", None) or trained):
                settings["short_factor"] = settings["long_factor"]
        elif kind == "dynamic":
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            turned = int(head * settings.get("partial_rotary_factor", 1.0))
            settings["rope_theta"] *= dynamic_growth(settings["factor"], turned)
            settings["rope_type"] = "default"


def build(kind: Any, config: Any, attention: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Return the model with weights as transformers initializes them."""
    try:
        with torch.device(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return kind._from_config(config, attn_implementation=attention, dtype=dtype).eval()
    except Exception as error:
        if isinstance(error, KeyError) and attention in error.args:
            raise Recomputable("its attention does not go through transformers' attention interface") from error
        raise ModelError(f"transformers cannot build it ({error_summary(error)})") from error


DIGITS, RADIX = 4, 128  # of token ids in the cache of a recomputed model
# arguments of attention functions that do not change the result
NEUTRAL = frozenset({"cache_position", "dropout", "logits_to_keep", "position_ids", "return_dict", "use_cache"})
FOLLOWED = frozenset({"attention_mask", "is_causal", "s_aux", "scaling", "sliding_window", "softcap"})
TOLERANCE = 0.02  # relative; a module that mixes tokens changes far more than rounding does


@dataclass(frozen=True)
class ModuleCall:
    """One call of the attention function by a layer."""

    path: str  # of the calling module
    spec: AttentionSpec
    doubts: tuple[str, ...]

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.spec.kv_heads, self.spec.head_dim, self.spec.window)


class CallRecorder:
    """Records every call and returns a tensor of the right shape."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in model.named_modules()}
        self.calls: list[ModuleCall] = []
        for module in self.paths:
            install(self, module)

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:
        doubts = tuple(_doubts(module, query, key, value, options))
        self.calls.append(ModuleCall(self.paths[module], _spec(query, key, value, options), doubts))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _spec(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> AttentionSpec:
    """Return the attention of a call; head_dim is the larger of keys' and values', the other is padded with zeros."""
    _, heads, _, head_dim = query.shape
    mask, scale = options["attention_mask"], options.get("scaling")
    return AttentionSpec(
        heads=heads,
        kv_heads=key.shape[1],
        head_dim=max(head_dim, value.shape[-1]),
        scale=float(scale) if isinstance(scale, int | float) else head_dim**-0.5,
        window=mask.window if isinstance(mask, Mask) else options.get("sliding_window"),
        soft_cap=options.get("softcap"),
        sinks=options.get("s_aux") is not None,
    )


def _doubts(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Iterator[str]:
    mask, scale, sinks = options["attention_mask"], options.get("scaling"), options.get("s_aux")
    if key.shape[:-1] != value.shape[:-1] or key.shape[-1] != query.shape[-1]:
        yield f"queries, keys and values differ in shape ({[*query.shape]}, {[*key.shape]} and {[*value.shape]})"
    if key.shape[2] != query.shape[2]:
        yield "it attends to other tokens than its own"
    if not (mask is None or isinstance(mask, Mask)) or (isinstance(mask, Mask) and not mask.causal):
        yield "its mask is not simply causal (a bias, chunks, or attention in both directions)"
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        yield "it is not causal"
    if not (scale is None or isinstance(scale, int | float)):
        yield "its scale is not a number"
    if sinks is not None and sinks.shape != (query.shape[1],):
        yield "its sinks are not one number per head"
    if options.get("dropout"):
        yield "it has dropout"
    for name in sorted(options.keys() - NEUTRAL - FOLLOWED):
        if options[name] is not None and not name.startswith("output_"):
            yield f"its attention takes {name}, which is not understood"


def trace(model: Any, layers: Sequence[LayerCache] | None = None) -> tuple[list[ModuleCall], Tensor]:
    """Return the attention calls of a model built with WATCHED attention on the meta device, and its hidden states [T, H].

    layers: the planned cache, which the calls must match; None: it is not planned yet.
    """
    _check_class(model)
    recorder = CallRecorder(model)
    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    try:
        # a mask of ones keeps transformers from searching positions for packed sequences
        hidden = model.base_model(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
    except ModelError:
        raise
    except Exception as error:
        raise Recomputable(f"a trial run without weights fails ({error_summary(error)})") from error
    calls, count = recorder.calls, model.config.get_text_config().num_hidden_layers
    if not calls or len(calls) % count:  # some attend several times
        raise Recomputable(f"{len(calls)} of its {count} layers attend through transformers' attention interface")
    for index, call in enumerate(calls):
        doubts = list(call.doubts)
        if layers is not None and len(layers) == len(calls):
            for what in ("kv_heads", "head_dim", "window"):
                if getattr(call.spec, what) != getattr(layers[index], what):
                    planned = getattr(layers[index], what)
                    doubts.append(f"its {what} is {getattr(call.spec, what)}, but the cache is planned for {planned}")
        if doubts:
            raise Recomputable(f"layer {index}: {'; '.join(doubts)}")
    if layers is not None and len(layers) != len(calls):
        raise ModelError(f"it attends {len(calls)} times, but the cache is planned for {len(layers)}")
    return calls, hidden[0]


def plan_cache(facts: "ModelFacts") -> "ModelFacts":
    """Return `facts` with the attention layers of the model, or with one layer of token ids where it is recomputed."""
    config, kind = find_class(facts)
    bare = replace(facts, unsupported_reason="", kinds=(), states=())
    try:
        model = build(kind, config, WATCHED, torch.bfloat16, torch.device("meta"), seed=0)
        calls, _ = trace(model)
    except Recomputable as error:
        return replace(bare, layers=(LayerCache(1, DIGITS),), recomputed=str(error))
    return replace(bare, layers=tuple(call.cache for call in calls))


def _check_class(model: Any) -> None:
    config = model.config
    if config.is_encoder_decoder:
        raise ModelError("it is an encoder-decoder; only decoders are served")
    if model._is_stateful:
        raise Recomputable("it has recurrent states in addition to keys and values")
    if getattr(config, "alibi", False):
        raise Recomputable("it has a position bias in attention (ALiBi)")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise Recomputable("it has no position_ids: it has a position bias in attention (ALiBi) or counts positions itself")
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise Recomputable("its positions begin after the padding token's id, not at 0 (RoBERTa)")


class Probe:
    """Attention of each token to itself alone. `seen`: each layer's queries and keys, [T, heads + kv_heads, head_dim]."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:  # noqa: ARG002
        self.seen.append(torch.cat((query, key), dim=1)[0].transpose(0, 1).float())
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()


def check_tokens_meet_in_attention_only(
    body: Any, attending: Sequence[nn.Module], vocab_size: int, device: torch.device
) -> None:
    """Raise ModelError if tokens influence each other outside of attention, or positions are not those of `position_ids`.

    attending: the modules that call the attention function; they keep a probe installed.
    """

    def run(ids: Sequence[int], positions: Sequence[int] | None) -> list[Tensor]:
        """Return each layer's queries and keys. Without `positions` the model counts them itself."""
        probe = Probe()
        for module in attending:
            install(probe, module)
        tokens = torch.tensor([ids], device=device) % vocab_size
        given = None if positions is None else torch.tensor([positions], device=device)
        with torch.inference_mode():
            body(input_ids=tokens, position_ids=given, use_cache=False)
        return probe.seen

    def differ(ones: list[Tensor], others: list[Tensor]) -> bool:
        """Return whether queries or keys of the second token differ in any layer."""
        return any(_differ(one[1], other[1]) for one, other in zip(ones, others, strict=True))

    plain = run((3, 5), (0, 1))
    if not all(layer.isfinite().all() for layer in plain):
        return  # NaN or infinite: nothing can be compared
    if differ(plain, run((7, 5), (0, 1))):
        raise ModelError("tokens influence each other outside of attention (a convolution, a shift or a recurrent state)")
    if not differ(plain, run((3, 5), (4, 6))):
        raise ModelError("it ignores position_ids")
    if any(_differ(layer[0], layer[1]) for layer in run((5, 5), (1, 1))):
        raise ModelError("it counts positions itself, whatever position_ids say")
    if differ(plain, run((3, 5), None)):
        raise ModelError("its positions do not begin at 0 (RoBERTa's begin after the padding token's id, for instance)")


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() > TOLERANCE * one.norm())
