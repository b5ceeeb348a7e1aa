"""adapter_config.json, as PEFT writes it: what kind of adapter it is, and the rank and scale of each of its matrices."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.files.reading import shown
from quire.layers.quant.patterns import Patterns
from quire.types.checks import is_finite
from quire.types.errors import AdapterError, ModelError

SIMPLE = re.compile(r"[\w.\-]*")  # a pattern that cannot take long
MAX_PATTERNS = 10_000
EMBEDDING = ""  # among the names of `tokens`: the model's embedding, whatever it is called
# what changes how an adapter is run, and is not built
REFUSED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
    "use_bdlora", "use_qalora",
)  # fmt: skip
CHANGES_MODEL = ("pissa", "olora", "corda", "lora_ga")  # ways to begin that leave the rest of the model other than it was


@dataclass(frozen=True)
class AdapterConfig:
    rank: int
    alpha: float
    root: bool  # rsLoRA: by the square root of the rank
    dora: bool
    ranks: "ByPattern"
    alphas: "ByPattern"
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # end of a module's name -> whose rows it replaces

    def rank_of(self, module: str) -> int:
        return int(self.ranks.of(module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return self.alphas.of(module, self.alpha) / (math.sqrt(rank) if self.root else rank)


class ByPattern:
    """A number for modules whose path, or its end, fits a regular expression: the first that does."""

    def __init__(self, where: str, field: str, given: Mapping[str, float]) -> None:
        self._where, self._given = where, dict(given)
        self._simple = {key: re.compile(_whole(key)) for key in given if SIMPLE.fullmatch(key)}
        others = [key for key in given if key not in self._simple]
        try:
            self._others, self._keys = Patterns(field, [_whole(key) for key in others]), others
        except ModelError as error:
            raise AdapterError(f"{where}: {error}".replace("quantization_config: ", ""), "lora_path") from error

    def of(self, module: str, otherwise: float) -> float:
        fitting: set[str] = set()
        if self._keys:
            try:
                fitting = {key for key, fits in zip(self._keys, self._others.match(module), strict=True) if fits}
            except ModelError as error:
                raise AdapterError(f"{self._where}: {error}".replace("quantization_config: ", ""), "lora_path") from error
        for key, number in self._given.items():
            if key in fitting or (key in self._simple and self._simple[key].match(module)):
                return number
        return otherwise


def _whole(key: str) -> str:
    return rf"(.*\.)?({key})$"


def interpret(config: Mapping[str, Any], where: str) -> AdapterConfig:
    """`where`: the file, for messages."""

    def wrong(message: str) -> AdapterError:
        return AdapterError(f"{where}: {message}", "lora_path")

    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise wrong(f"peft_type is {shown(kind)}; only LORA is run")
    for name in REFUSED:
        if config.get(name):
            raise wrong(f"{name} is {shown(config[name])}; adapters with it cannot be run")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_MODEL):
        raise wrong(
            f"init_lora_weights is {shown(begun)}: the adapter belongs to a changed model; save it with PEFT's conversion "
            "(path_initial_model_for_weight_conversion)"
        )
    for name in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying"):
        if not isinstance(config.get(name, False), bool | None):
            raise wrong(f"{name} must be true or false, got {shown(config[name])}")
    if config.get("ensure_weight_tying"):
        raise wrong("ensure_weight_tying is true; head and embedding cannot be tied to each other in an adapter")
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise wrong(f"bias must be none, all or lora_only, got {shown(config['bias'])}")
    if config.get("lora_bias") and config.get("use_dora"):
        raise wrong("lora_bias and use_dora cannot be run together")
    targets = config.get("target_modules")
    if not (targets is None or isinstance(targets, str) or _are_strings(targets)):
        raise wrong(f"target_modules must be names or a pattern, got {shown(targets)}")
    return AdapterConfig(
        rank=_rank(config.get("r", 8), "r", wrong),
        alpha=_alpha(config.get("lora_alpha", 8), "lora_alpha", wrong),
        root=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        ranks=_by_pattern(config, "rank_pattern", _rank, where, wrong),
        alphas=_by_pattern(config, "alpha_pattern", _alpha, where, wrong),
        tokens=_tokens(config.get("trainable_token_indices"), wrong),
    )


def _tokens(given: Any, wrong: Any) -> dict[str, tuple[int, ...]]:
    """`trainable_token_indices`: a list for the embedding, or lists by module."""
    if given is None:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for module, indices in given.items() if isinstance(given, dict) else [(EMBEDDING, given)]:
        if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < 1 << 63 for index in indices):
            raise wrong(f"trainable_token_indices must be token ids, or a table from modules to token ids, got {shown(given)}")
        if len(set(indices)) < len(indices):
            raise wrong(f"trainable_token_indices has a token twice: {shown(indices)}")
        if indices:
            found[module] = tuple(indices)
    return found


def _by_pattern(config: Mapping[str, Any], field: str, check: Any, where: str, wrong: Any) -> ByPattern:
    given = config.get(field) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise wrong(f"{field} must be a table from names of modules to numbers, got {shown(given)}")
    return ByPattern(where, field, {key: check(value, f"{field}[{shown(key)}]", wrong) for key, value in given.items()})


def _rank(value: Any, name: str, wrong: Any) -> int:
    if type(value) is not int or value < 1:
        raise wrong(f"{name} must be an integer of at least 1; got {shown(value)}")
    return value


def _alpha(value: Any, name: str, wrong: Any) -> float:
    if type(value) not in (int, float) or not is_finite(value):
        raise wrong(f"{name} must be a number that a float can hold, got {shown(value)}")
    return float(value)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
