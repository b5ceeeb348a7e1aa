# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Expert parallelism: memory of redundant experts, and of experts that other engines have."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.fields import FLAG, NUMBER, OBJECT, setting
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.config import Config

LEAST = {"window_size": 1, "step_interval": 1}
IGNORED = ("use_async", "policy", "communicator")  # how weights are sent, and which policy decides: only one is built


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


@dataclass
class ExpertArgs:
    enable_expert_parallel: bool = setting(
        False,
        FLAG,
        "several processes",
        "each of them, of all engines of data_parallel_size together, has some of the experts, instead of a part of each",
        short="-ep",
        after="pipeline_layer_partition",
    )
    enable_eplb: bool = setting(
        False,
        FLAG,
        "several processes",
        "experts move between ranks so that each has equally much to do",
        after="enable_expert_parallel",
    )
    num_redundant_experts: int | None = setting(
        None,
        NUMBER,
        "several processes",
        "with enable_eplb: further copies of experts in every layer, all ranks together",
        low=0,
        after="enable_eplb",
    )
    eplb_config: dict[str, Any] = setting(
        {},
        OBJECT,
        "several processes",
        "of enable_eplb: window_size (1000) steps whose loads count, step_interval (3000), "
        "num_redundant_experts (0), log_balancedness",
        after="num_redundant_experts",
    )


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "no experts to divide",
        lambda c: (c.args.enable_expert_parallel or c.args.enable_eplb) and not c.experts,
        lambda c: (
            f"{' and '.join(name for name in ('enable_expert_parallel', 'enable_eplb') if getattr(c.args, name))}: "
            f"{c.facts.architecture} has no experts; leave that out"
        ),
    ),
    Conflict(
        "more ranks than experts",
        lambda c: c.args.enable_expert_parallel and 0 < c.experts < c.expert_ranks,
        lambda c: (
            f"enable_expert_parallel: {c.experts} experts cannot be divided among {c.expert_ranks} ranks"
            + f" ({c.args.data_parallel_size} engines)" * (c.expert_ranks > c.ranks)
            + ("; without it each has a part of every expert" if c.ranks > 1 else "; without it each engine has all of them")
        ),
    ),
    Conflict(
        "experts shared by engines",
        lambda c: c.shares_experts and bool(_why_not_shared(c)),
        lambda c: (
            f"enable_expert_parallel: the {c.args.data_parallel_size} engines of data_parallel_size share the experts then, "
            f"which is not supported with {_why_not_shared(c)} yet. Leave one of them out"
        ),
    ),
    Conflict(
        "experts that are not divided",
        lambda c: c.args.enable_eplb and c.experts > 0 and not _has_whole_experts(c),
        lambda c: (
            "enable_eplb needs whole experts on several ranks: enable_expert_parallel, which is "
            f"{'on' if c.args.enable_expert_parallel else 'off'}, and tensor_parallel_size above 1, which is {c.ranks}, or "
            f"data_parallel_size, which is {c.args.data_parallel_size}"
        ),
    ),
    Conflict(
        "expert copies without balancing",
        lambda c: not c.args.enable_eplb and bool(c.args.num_redundant_experts or c.args.eplb_config),
        lambda c: "num_redundant_experts and eplb_config do nothing without enable_eplb; add it, or leave them out",  # noqa: ARG005
    ),
    Conflict(
        "more copies of experts than ranks",
        lambda c: (
            c.args.enable_eplb
            and _has_whole_experts(c)
            and 0 < c.experts * (c.expert_ranks - 1) < _copies(c)
        ),
        lambda c: (
            f"num_redundant_experts {_copies(c)}: with {c.expert_ranks} ranks each of the {c.experts} experts can "
            f"have {c.expert_ranks} copies, so {c.experts * (c.expert_ranks - 1)} is the most"
        ),
    ),
    Conflict(
        "balanced experts with adapters, or quantized",
        lambda c: c.args.enable_eplb and (c.max_loras > 0 or c.keep_quantized),
        lambda c: (
            f"enable_eplb is not supported with {'enable_lora' if c.max_loras else 'quantized weights'}: it moves unquantized "
            "experts without adapters. Leave one of them out"
        ),
    ),
)  # fmt: skip


class ExpertParallel(Feature):
    name = "experts"
    conflicts = CONFLICTS
    cache_salt = None  # which rank computes an expert does not change its result

    def check(self, args: ExpertArgs) -> None:
        read_eplb(args.eplb_config, args.num_redundant_experts)

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        if not config.args.enable_eplb:
            return NO_MEMORY
        redundant = _copies(config)
        return Memory(weights=-(-redundant // config.expert_ranks) * sizes.expert)


def _copies(config: "Config") -> int:
    return read_eplb(config.args.eplb_config, config.args.num_redundant_experts).num_redundant_experts


def _why_not_shared(config: "Config") -> str:
    """Return the settings with which engines cannot share experts."""
    args, facts = config.args, config.facts
    on_ray, remote = args.data_parallel_backend == "ray", config.local_engines < args.data_parallel_size
    return " or ".join(
        what
        for what, applies in (
            (f"the device {config.device} (CPUs and CUDA GPUs can)", config.device not in ("cpu", "cuda")),
            (f"pipeline_parallel_size={config.stages}", config.stages > 1),
            ("data_parallel_backend=ray", on_ray),
            ("engines on other machines (data_parallel_size_local)", remote and not on_ray),
            ("enable_lora", config.max_loras > 0),
            (f"{facts.architecture}, which transformers runs,", facts.by_transformers),
        )
        if applies
    )


def _has_whole_experts(config: "Config") -> bool:
    return config.args.enable_expert_parallel and config.expert_ranks > 1
