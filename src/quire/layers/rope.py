"""Rotary position embedding: the frequencies of each scaling scheme, and the table of cosines and sines.

The frequencies do not depend on the request: keys are cached already rotated, so one model has one table. transformers
changes two schemes with the length of the text; here they are fixed, as in vLLM. dynamic: the base for the extended length,
max_position_embeddings * factor. longrope: long factors if `max_position` exceeds the original length, else short ones.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.files.reading import shown
from quire.ops.arguments import Rotation
from quire.types.errors import ModelError


@dataclass(frozen=True)
class Scheme:
    """Inputs of a rope scheme."""

    dim: int  # rotary dimensions of a head
    base: float
    trained: int  # max_position_embeddings of the configuration
    original: int  # context length of pre-training, before any extension
    max_position: int  # longest context of the engine
    parameters: Mapping[str, Any]

    def need(self, name: str) -> Any:
        if self.parameters.get(name) is None:
            raise ModelError(f"the rope parameters of the model's configuration lack {name!r}")
        return self.parameters[name]

    @property
    def stretch(self) -> float:
        factor = self.parameters.get("factor")
        return float(factor) if factor is not None else self.trained / self.original


# inverse frequencies [dim / 2] float32, and a factor on cosines and sines
Frequencies = tuple[Tensor, float]


def _inverse(base: float, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))


def _default(s: Scheme) -> Frequencies:
    return _inverse(s.base, s.dim), 1.0


def _still(s: Scheme) -> Frequencies:
    """Return frequencies of 0: no rotation."""
    return torch.zeros(s.dim // 2, dtype=torch.float32, device="cpu"), 1.0


def _linear(s: Scheme) -> Frequencies:
    return _inverse(s.base, s.dim) / s.need("factor"), 1.0


def _dynamic(s: Scheme) -> Frequencies:
    alpha = s.parameters.get("alpha")
    if alpha:  # Hunyuan: a fixed base
        return _inverse(s.base * alpha ** (s.dim / (s.dim - 2)), s.dim), 1.0
    return _inverse(s.base * dynamic_growth(s.need("factor"), s.dim), s.dim), 1.0


def dynamic_growth(factor: float, dim: int) -> float:
    """Return what the base of dynamic rope is multiplied by for a text of max_position_embeddings * factor tokens."""
    return float((factor * factor - (factor - 1)) ** (dim / (dim - 2)))


def _ntk(s: Scheme) -> Frequencies:
    """GTE: a larger base, and all frequencies lowered (fixed NTK), or frequencies lowered by dimension (mixed NTK)."""
    factor, power = s.need("factor"), s.parameters.get("mixed_b")
    if power is None:
        return _inverse(s.base * factor, s.dim) / factor ** (2 / s.dim), 1.0
    half = s.dim // 2
    growth = math.log(factor) / half**power * torch.arange(1, half + 1, dtype=torch.float32, device="cpu") ** power
    return _inverse(s.base, s.dim) / growth.exp(), 1.0


def _llama3(s: Scheme) -> Frequencies:
    """Scale low frequencies, keep high ones, and blend between."""
    factor, low, high = s.need("factor"), s.need("low_freq_factor"), s.need("high_freq_factor")
    plain = _inverse(s.base, s.dim)
    wave = 2 * math.pi / plain
    blend = ((s.original / wave - low) / (high - low)).clamp(0.0, 1.0)
    between = (1 - blend) * (plain / factor) + blend * plain
    return torch.where(wave > s.original / low, plain / factor, torch.where(wave < s.original / high, plain, between)), 1.0


def _yarn(s: Scheme) -> Frequencies:
    """Keep dimensions that rotate often within the original context, scale those that rotate rarely."""
    factor = s.stretch

    def component(turns: float) -> float:
        return s.dim * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(s.base))

    low, high = component(s.parameters.get("beta_fast") or 32), component(s.parameters.get("beta_slow") or 1)
    if s.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, s.dim - 1)
    ramp = ((torch.arange(s.dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    powers = s.base ** (torch.arange(0, s.dim, 2, dtype=torch.float32, device="cpu") / s.dim)
    return ramp / (factor * powers) + (1 - ramp) / powers, _yarn_attention(s.parameters, factor)


def _yarn_attention(parameters: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(above) / magnitude(below) if above and below else magnitude(1.0)


def _longrope(s: Scheme) -> Frequencies:
    factors = s.need("long_factor" if s.max_position > s.original else "short_factor")
    if len(factors) != s.dim // 2:
        raise ModelError(f"longrope requires {s.dim // 2} factors for {s.dim} rotary dimensions; got {len(factors)}")
    attention = s.parameters.get("attention_factor")
    if attention is None:  # Phi-MoE has one for each kind of factors
        attention = s.parameters.get("long_mscale" if s.max_position > s.original else "short_mscale")
    if attention is None:
        attention = 1.0 if s.stretch <= 1 else math.sqrt(1 + math.log(s.stretch) / math.log(s.original))
    powers = s.base ** (torch.arange(0, s.dim, 2, dtype=torch.float32, device="cpu") / s.dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers), float(attention)


def _proportional(s: Scheme) -> Frequencies:
    """Rotate a part of the dimensions, at the frequencies of a full rotation."""
    turning = int(s.parameters["partial_rotary_factor"] * s.dim // 2)
    plain = _inverse(s.base, s.dim) / float(s.parameters.get("factor") or 1.0)
    plain[turning:] = 0.0
    return plain, 1.0


SCHEMES: dict[str, Callable[[Scheme], Frequencies]] = {
    "default": _default,
    "none": _still,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "su": _longrope,  # longrope's former name
}


def rope_parameters(hf: Mapping[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    """Return the rope settings of a configuration.

    New configurations have `rope_parameters`, for all layers or per layer type; older ones `rope_theta` and `rope_scaling`.
    """
    found = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if layer_type is not None and isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    settings = {"rope_theta": hf.get("rope_theta") or 10000.0, "partial_rotary_factor": hf.get("partial_rotary_factor") or 1.0}
    settings |= {name: value for name, value in found.items() if value is not None}
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    return settings


class Rope(nn.Module):
    """Rotary embedding, shared by all layers with the same settings. parameters: from `rope_parameters`."""

    table: Rotation

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        hf: Mapping[str, Any],
        parameters: Mapping[str, Any],
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        kind = parameters["rope_type"]
        if kind not in SCHEMES:
            raise ModelError(f"unknown rope type {kind!r}; known are {', '.join(SCHEMES)}")
        trained = hf.get("max_position_embeddings") or max_position
        original = hf.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings") or trained
        part = 1.0 if kind == "proportional" else parameters["partial_rotary_factor"]
        self.scheme = Scheme(
            dim=int(head_dim * part + 1e-6),  # float products may be slightly below the integer
            base=float(parameters["rope_theta"]),
            trained=int(trained),
            original=int(original),
            max_position=max_position,
            parameters=parameters,
        )
        if self.scheme.dim % 2 or not 2 <= self.scheme.dim <= head_dim:
            raise ModelError(
                f"the rotary dimensions of a head must be an even number of at most {head_dim}; got {self.scheme.dim} "
                f"(partial_rotary_factor {part:g})"
            )
        self.frequencies, self.factor = SCHEMES[kind](self.scheme)
        if not (self.frequencies.isfinite().all() and math.isfinite(self.factor)):
            raise ModelError(
                f"the rope parameters of the model's configuration give values that are not finite: {shown(dict(parameters))}"
            )

    def finish(self, device: torch.device) -> None:
        angles = torch.arange(self.scheme.max_position, device=device).float().unsqueeze(1) * self.frequencies.to(device)
        self.table = Rotation(angles.cos() * self.factor, angles.sin() * self.factor, self.interleaved)
