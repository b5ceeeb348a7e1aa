"""Our attention as an attention function of transformers.

transformers looks attention functions up by name. Ours calls the handler that is installed on the calling module, so that one
process can hold many models.

    WATCHED   the attention function receives a description of the mask (`Mask`) instead of the mask
    SERVED    no mask is made
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from quire.files.reading import told
from quire.layers.rope import dynamic_growth
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
        raise Recomputable("it computes with its attention mask instead of handing it on")

    def __getitem__(self, index: Any) -> Any:
        raise Recomputable("it cuts its attention mask instead of handing it on")

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise Recomputable("it computes with its attention mask instead of handing it on")


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
        raise ModelError(f"transformers does not accept its configuration ({told(error)})") from error
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
        raise ModelError(f"transformers cannot build it ({told(error)})") from error
