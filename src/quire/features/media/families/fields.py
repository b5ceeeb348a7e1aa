"""Fields of multimodal configurations, with the defaults of their classes: config.json may leave them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.hf import explicit_config
from quire.files.reading import shown
from quire.types.errors import InvalidParameter, ModelError

_CLIP: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3,
    "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_SIGLIP: Mapping[str, Any] = {**_CLIP, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
CLIP_LARGE: Mapping[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
SIGLIP_LARGE: Mapping[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
}  # fmt: skip
_IDEFICS: Mapping[str, Any] = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": _CLIP, "siglip_vision_model": _SIGLIP, "idefics3_vision": _IDEFICS,
    "idefics2_vision": {**_SIGLIP, "patch_size": 32},
}  # fmt: skip
ENCODERS = ("clip_vision_model", "siglip_vision_model")


def size_field(config: Mapping[str, Any], name: str, default: int | None = None, where: str = "config.json") -> int:
    """Return a positive integer. A list of equal integers is read as one of them."""
    value = config.get(name, default)
    if isinstance(value, list | tuple) and value and all(part == value[0] for part in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {name} must be an integer of at least 1; got {shown(value)}")
    return value


def token_field(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    """Return a token id that is stored under one of the names."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"config.json: {names[0]} must be a token id; got {shown(value)}")
    return value


def choice_field(config: Mapping[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    value = config.get(name, default)
    if value not in choices:
        raise ModelError(f"config.json: {name} must be one of {', '.join(choices)}; got {shown(value)}")
    return str(value)


def text_width(config: Mapping[str, Any]) -> int:
    """Return the hidden size of the language model."""
    return size_field(explicit_config(config, {}), "hidden_size", where="text_config")


@dataclass(frozen=True)
class VisionConfig:
    """The `vision_config` of a CLIP or SigLIP encoder, or of a variant of them."""

    kind: str  # model_type
    width: int
    inner: int
    layers: int
    heads: int
    channels: int
    image_size: int
    patch_size: int
    activation: str
    eps: float

    @property
    def side(self) -> int:
        """Return the patches along each side of an image."""
        return self.image_size // self.patch_size

    @property
    def class_tokens(self) -> int:
        return int(self.kind == "clip_vision_model")


def read_vision(config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, kind: str = "") -> VisionConfig:
    """Read `vision_config`.

    defaults: of the model's class where the whole object is missing, and its `model_type`.
    kind: the encoder of the model, if it is always the same; else `model_type` names one of ENCODERS.
    """
    defaults = defaults or {}
    found = config.get("vision_config") or defaults
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: vision_config must be an object; got {shown(found)}")
    named = str(found.get("model_type") or defaults.get("model_type") or "siglip_vision_model")
    kind = kind or (named if named.endswith("_vision_model") else f"{named}_vision_model")
    if kind not in VISION_DEFAULTS:
        raise ModelError(f"vision_config: model_type must be one of {', '.join(ENCODERS)}; got {shown(kind)}")
    full = {**VISION_DEFAULTS[kind], **{name: value for name, value in found.items() if value is not None}}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels",
             "image_size", "patch_size")  # fmt: skip
    width, inner, layers, heads, channels, image, patch = (size_field(full, name, where="vision_config") for name in names)
    if width % heads or patch > image:
        raise ModelError(
            f"vision_config: {heads} heads must divide hidden_size {width}, and patch_size {patch} must not exceed "
            f"image_size {image}"
        )
    return VisionConfig(
        kind, width, inner, layers, heads, channels, image, patch, str(full["hidden_act"]), float(full["layer_norm_eps"])
    )


def feature_layers(config: Mapping[str, Any], layers: int, name: str = "vision_feature_layer", default: Any = -2) -> list[int]:
    """Return which hidden states of the encoder are read: 0 is its input, n the output of its n-th layer."""
    value = config.get(name, default)
    chosen = value if isinstance(value, list | tuple) else [value]
    if not chosen or not all(type(layer) is int and -layers - 1 <= layer <= layers for layer in chosen):
        raise ModelError(f"config.json: {name} must be one or more layers of {layers}; got {shown(value)}")
    return [layer % (layers + 1) for layer in chosen]


def image_settings(processor: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the image processor: processor_config.json nests them, preprocessor_config.json has no others."""
    inner = processor.get("image_processor")
    return {**inner, **processor} if isinstance(inner, Mapping) else processor


def check_image_size(shape: tuple[int, ...], size: int) -> None:
    """Refuse pixels [..., height, width] of a size that the encoder has no positions for."""
    if shape[-2:] != (size, size):
        raise InvalidParameter(
            f"mm_processor_kwargs must give images of {size} x {size} pixels, the size of the model's image encoder; got "
            f"{shape[-1]} x {shape[-2]}. Remove the arguments that change the size.",
            "mm_processor_kwargs",
        )
