"""`enable_eplb`: experts are balanced over the ranks that have them, by names that are vLLM's."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.types.errors import ConfigError

LEAST = {"window_size": 1, "step_interval": 1}
IGNORED = ("use_async", "policy", "communicator")  # how weights travel, and who decides: there is one way


@dataclass(frozen=True)
class EplbConfig:
    window_size: int = 1000  # steps whose loads count
    step_interval: int = 3000  # steps from one time to the next
    num_redundant_experts: int = 0  # copies, of all ranks together, in every layer
    log_balancedness: bool = False


def read_eplb(given: Mapping[str, Any], redundant: int | None) -> EplbConfig:
    """redundant: the field of its own, which vLLM has as well."""
    known = {field.name: field for field in dataclasses.fields(EplbConfig)}
    unknown = sorted(set(given) - set(known) - set(IGNORED))
    if unknown:
        raise ConfigError(f"eplb_config: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    values = {name: value for name, value in given.items() if name in known}
    if redundant is not None and values.setdefault("num_redundant_experts", redundant) != redundant:
        raise ConfigError(
            f"num_redundant_experts is {redundant}, and in eplb_config {values['num_redundant_experts']}; say it once"
        )
    for name in values:
        value: Any = values[name]
        kind: type = bool if name == "log_balancedness" else int
        low = LEAST.get(name, 0)
        good = type(value) is kind
        if not good or value < low:
            right = "true or false" if kind is bool else f"a number, at least {low}"
            raise ConfigError(f"eplb_config.{name} must be {right}, got {value!r}")
    return EplbConfig(**values)
