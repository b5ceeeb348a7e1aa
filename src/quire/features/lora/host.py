"""LoRA adapters: memory and cache salt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.fields import FLAG, FLOAT_NAMES, FLOATS, NUMBER, TEXT, setting
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.features.media.host import media_names
from quire.types.cache import DTYPE_BYTES
from quire.types.errors import ConfigError
from quire.types.json_text import read_json
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config

_KEYS = ("name", "path", "base_model_name")


@dataclass(frozen=True)
class LoRAModule:
    name: str
    path: str
    base_model_name: str | None = None


def read_modules(values: Sequence[str | Mapping[str, Any]]) -> list[LoRAModule]:
    modules = [_read(value) for value in values]
    for module in modules:
        if sum(other.name == module.name for other in modules) > 1:
            raise ConfigError(f"lora_modules: there are two adapters {module.name!r}; give each a name of its own")
    return modules


def _read(value: str | Mapping[str, Any]) -> LoRAModule:
    given: Any = value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            given = read_json(value)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {value!r} is not JSON ({error})") from None
    elif isinstance(value, str):
        name, separator, path = value.partition("=")
        if not separator:
            raise ConfigError(f"lora_modules: {value!r} is neither name=path nor a JSON object")
        given = {"name": name, "path": path}
    if unknown := set(given) - set(_KEYS):
        names = ", ".join(sorted(map(str, unknown)))
        raise ConfigError(f"lora_modules: unknown {names} in {value!r}; known are {', '.join(_KEYS)}")
    for key in ("name", "path"):
        if not isinstance(given.get(key), str) or not given[key].strip():
            raise ConfigError(f"lora_modules: {value!r} has no {key}; write name=path, or JSON with name and path")
    return LoRAModule(given["name"], given["path"], given.get("base_model_name"))


UPLOADS = 2  # copies of an adapter on a GPU besides the slots: as in its file, and as the layers read it


def reserved_bytes(slots: int, adapter: int, uploads: bool) -> int:
    """Return bytes on the device for `slots` adapters of `adapter` bytes each. uploads: they are packed on the device."""
    return (slots + (UPLOADS if uploads else 0)) * adapter


@dataclass
class LoRAArgs:
    enable_lora: bool = setting(
        False,
        FLAG,
        "LoRA adapters",
        "requests may ask for LoRA adapters",
        after="spec_tokens",
    )
    max_loras: int = setting(
        1, NUMBER, "LoRA adapters", "most adapters on the device, and so in one step", low=1, after="enable_lora"
    )
    max_lora_rank: int = setting(
        16,
        NUMBER,
        "LoRA adapters",
        "largest rank of an adapter; a limit only, nothing is padded to it",
        low=1,
        after="max_loras",
    )
    max_cpu_loras: int | None = setting(
        None,
        NUMBER,
        "LoRA adapters",
        "most adapters in the host's memory, those on the device among them; default: max_loras",
        low=1,
        after="max_lora_rank",
    )
    lora_extra_vocab_size: int = setting(
        0,
        NUMBER,
        "LoRA adapters",
        "most tokens that an adapter may add to the model's own; the logits have room for this many more",
        low=0,
        after="max_cpu_loras",
    )
    lora_dtype: str = setting(
        "auto",
        TEXT,
        "LoRA adapters",
        "of adapters: the model's, whatever their files have",
        choices=("auto", *FLOATS),
        after="lora_extra_vocab_size",
    )


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "adapters of shared blocks",
        lambda c: c.max_loras > 0 and c.facts.hf.get("model_type") == "zamba2",
        lambda c: (
            f"enable_lora: adapters are not added to {c.facts.architecture} yet, whose layers share blocks; leave it out"
        ),
        "shared blocks",
        "enable_lora",
    ),
    Conflict(
        "adapters of what transformers runs",
        lambda c: c.max_loras > 0 and c.facts.by_transformers,
        lambda c: (
            f"enable_lora is not supported with models that transformers runs; got {c.facts.architecture}. Leave it out"
        ),
        "by transformers",
        "enable_lora",
    ),
    Conflict(
        "adapters in another type",
        lambda c: c.max_loras > 0 and FLOAT_NAMES.get(c.args.lora_dtype, c.args.lora_dtype) not in ("auto", c.dtype),
        lambda c: (
            f"lora_dtype {c.args.lora_dtype} differs from dtype {c.dtype}: adapters are added in the model's. Leave it at auto"
        ),
    ),
    Conflict(
        "drafts of tokens that only adapters have",
        lambda c: c.adapter_tokens > 0 and c.speculation is not None and c.speculation.method not in ("ngram", "suffix"),
        lambda c: (
            f"lora_extra_vocab_size is not supported with the speculation method {c.draft_method}: what "
            "drafts knows the model's own tokens only. Use ngram or suffix, or leave it out"
        ),
    ),
)  # fmt: skip


class LoRA(Feature):
    name = "lora"
    conflicts = CONFLICTS
    part = "quire.features.lora.device:LoRAPart"

    def check(self, args: LoRAArgs) -> None:
        if args.enable_lora and args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
            raise ConfigError(
                f"max_cpu_loras {args.max_cpu_loras} is less than max_loras {args.max_loras}, and those on the device are in "
                "the host's memory, too. Raise it, or leave it out"
            )

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        if not config.max_loras:
            return None
        return {
            "max_loras": config.max_loras, "max_rank": config.args.max_lora_rank, "added_tokens": config.adapter_tokens,
            "fixed": media_names(config), "kernels_only": bool(config.args.deterministic),
        }  # fmt: skip

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        if not config.max_loras:
            return NO_MEMORY
        twice = sizes.linear_values * DTYPE_BYTES[config.dtype] if _holds_twice(config) else 0
        if config.device_facts.one_memory:  # an adapter takes its own size there when it is loaded
            return Memory(weights=twice)
        return Memory(weights=twice, reserved=reserved_bytes(config.max_loras, sizes.adapter, config.device == "cuda"))

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:
        # without a reference, a caller chose the slot itself (tests of the device half): the slot stands for the version
        version = extras.adapter_slot if extras.lora is None else extras.lora.version
        return (f"adapter={version}",) if version else ()


def _holds_twice(config: "Config") -> bool:
    """Return whether CPU kernels hold a copy of the weights that adapters add to.

    Layers that run one by one have no copy: with recurrent states, or if a draft head reads hidden states between layers.
    """
    compiled = not config.facts.states and not (config.draft_head and config.draft_head.taps)
    return config.device_facts.packs_floats and config.dtype == "float32" and compiled
