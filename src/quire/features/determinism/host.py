"""Deterministic serving: the same request has the same bits, whatever else the engine does."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.fields import FLAG, setting
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.config import Config

NAME = "deterministic"
VARIABLE = "VLLM_BATCH_INVARIANT"
CPU_HEAD_DIM_MULTIPLE = 16  # which the attention kernels for CPUs require


@dataclass
class DeterminismArgs:
    deterministic: bool | None = setting(
        None, FLAG, "lengths and sampling",
        "tokens and logprobs of a request do not depend on the other requests, chunks, prefix hits or preemption; "
        f"default: whether {VARIABLE} is 1",
        after="seed",
    )  # fmt: skip


def _variable_is_set() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"the environment variable {VARIABLE} must be 0 or 1; got {value!r}")
    return value == "1"


def _unsupported(config: "Config") -> str:
    """Return the part of device, model or settings with which deterministic serving is not supported; "": none."""
    if config.device_facts.batch_dependence:
        return config.device_facts.batch_dependence
    if config.facts.by_transformers:
        return f"{config.facts.architecture}, which transformers runs"
    return _unsupported_by_gpu(config) if config.device == "cuda" else _unsupported_by_cpu(config)


def _unsupported_by_gpu(config: "Config") -> str:
    if config.facts.hf.get("model_type") == "gemma3n_text":  # PyTorch computes means over the hidden size
        return f"{config.facts.architecture} on a GPU"
    return "dtype=float32 on a GPU. Use bfloat16 or float16" if config.dtype == "float32" else ""


def _unsupported_by_cpu(config: "Config") -> str:
    layers = config.facts.layers
    if config.facts.states:
        return f"the recurrent layers of {config.facts.architecture} on a CPU"
    if config.facts.encoder:
        return f"encoders such as {config.facts.architecture} on a CPU"
    if any(layer.latent for layer in layers):
        return f"the latent attention of {config.facts.architecture} on a CPU"
    if config.dtype != "float32":
        return f"dtype={config.dtype} on a CPU. Use float32"
    if config.cache_bytes == 1:
        return f"kv_cache_dtype={config.args.kv_cache_dtype} on a CPU. Use auto"
    width = config.facts.hf.get("word_embed_proj_dim") or config.facts.hidden_size  # PyTorch runs OPT's projections to it
    if width != config.facts.hidden_size or any(layer.head_dim % CPU_HEAD_DIM_MULTIPLE for layer in layers):
        return f"the layer sizes of {config.facts.architecture} on a CPU"
    return ""


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "what deterministic does not support",
        lambda c: bool(c.args.deterministic and _unsupported(c)),
        lambda c: f"{NAME} is not supported with {_unsupported(c)}",
    ),
)


class Determinism(Feature):
    name = "determinism"
    conflicts = CONFLICTS
    part = "quire.features.determinism.device:FixedOrder"
    cache_salt = None  # an engine has one order

    def check(self, args: Any) -> None:
        if args.deterministic is None:
            args.deterministic = _variable_is_set()
        if args.deterministic and args.dequantized_copies:
            raise ConfigError(f"dequantized_copies is not supported with {NAME}. Remove it")  # sums of packed weights only
        if args.deterministic:
            args.dequantized_copies = False

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        return {} if config.args.deterministic else None

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        return NO_MEMORY
