# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Profiles of an engine's steps: the argument `profiler_config`, with vLLM's fields."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.fields import OBJECT, setting
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.config import Config

NAME = "profiler_config"
TORCH, CUDA = "torch", "cuda"
DIRECTORY_VARIABLES = ("QUIRE_TORCH_PROFILER_DIR", "VLLM_TORCH_PROFILER_DIR")
EXAMPLE = '{"profiler": "torch", "torch_profiler_dir": "traces"}'
REMEDY = f"--profiler-config '{EXAMPLE}'"
# fields of vLLM: the value that asks for nothing, and why others are refused
_UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "ignore_frontend": (True, "API processes run no torch code"),
    "capture_torch_profiler": (False, "CUDA graphs are recorded before and between requests; profile those steps"),
    "detailed_trace_annotation": (False, "steps are not annotated"),
    "warmup_iterations": (0, "use delay_iterations"),
    "wait_iterations": (0, "use delay_iterations"),
    "active_iterations": (5, "use max_iterations"),
}


@dataclass(frozen=True)
class ProfilerSettings:
    """The fields of `profiler_config`. Defaults are vLLM's, except that no table of times is written."""

    profiler: str
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    delay_iterations: int = 0
    max_iterations: int = 0


_FIELDS = {field.name: field.default for field in fields(ProfilerSettings)}


def read_settings(given: Mapping[str, Any]) -> ProfilerSettings | None:
    """Return the checked settings; None: there is no profiler."""
    values = {}
    for key, value in given.items():
        if key in _UNSUPPORTED:
            harmless, reason = _UNSUPPORTED[key]
            if value is not None and (value != harmless or type(value) is not type(harmless)):
                raise ConfigError(f"{NAME}.{key} is not supported; got {value!r}. Remove it: {reason}.")
        elif key not in _FIELDS:
            raise ConfigError(f"{NAME} has no field {key!r}; it has {', '.join([*_FIELDS, *_UNSUPPORTED])}")
        elif value is not None:
            values[key] = _checked(key, value)
    kind, directory = values.get("profiler"), values.get("torch_profiler_dir", "")
    if kind is None and directory:
        raise ConfigError(
            f"{NAME}.torch_profiler_dir requires {NAME}.profiler to be 'torch'; got none. Add it, as in {EXAMPLE}"
        )
    if kind is None:
        return None
    if kind == TORCH and not directory:
        raise ConfigError(
            f"{NAME}.torch_profiler_dir must be the folder of the traces; got none. Add it, as in {EXAMPLE}, or set "
            f"{DIRECTORY_VARIABLES[0]}."
        )
    if kind == CUDA and directory:
        raise ConfigError(f"{NAME}.torch_profiler_dir is not supported with profiler 'cuda', which writes no files. Remove it.")
    if directory:
        values["torch_profiler_dir"] = str(Path(directory).expanduser().absolute())
    return ProfilerSettings(**values)


def _checked(key: str, value: Any) -> Any:
    default = _FIELDS[key]
    if key == "profiler":
        if value not in (TORCH, CUDA):
            raise ConfigError(f"{NAME}.profiler must be 'torch' or 'cuda'; got {value!r}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{NAME}.{key} must be true or false; got {value!r}")
    elif isinstance(default, int):
        if type(value) is not int or value < 0:
            raise ConfigError(f"{NAME}.{key} must be an integer of at least 0; got {value!r}")
    elif not isinstance(value, str) or "://" in value:
        raise ConfigError(f"{NAME}.{key} must be the path of a folder; got {value!r}")
    return value


@dataclass
class ProfilerArgs:
    profiler_config: dict[str, Any] = setting(
        {}, OBJECT, "other",
        "profiler (torch, cuda), torch_profiler_dir (folder of the traces), delay_iterations, max_iterations, ...: lets "
        "start_profile and stop_profile profile the steps of every rank",
        after="disable_log_stats",
    )  # fmt: skip


CONFLICTS = (
    Conflict(
        "a profiler of another device",
        lambda c: c.args.profiler_config.get("profiler") == CUDA and c.device != "cuda",
        lambda c: f"{NAME}.profiler 'cuda' requires a CUDA device; got {c.device}. Use 'torch'.",
    ),
    Conflict(
        "a profile of nothing",
        lambda c: bool(c.args.profiler_config.get("profiler")) and c.args.distributed_executor_backend == "fake",
        lambda c: f"{NAME} is not supported with distributed_executor_backend='fake', which runs no model. Remove it.",  # noqa: ARG005
    ),
)


class Profiling(Feature):
    name = "profiling"
    conflicts = CONFLICTS
    cache_salt = None  # a profile changes no keys and values
    part = "quire.features.profiling.device:ProfilingPart"

    def check(self, args: ProfilerArgs) -> None:
        """Check the fields. Without any, an environment variable may name the folder."""
        directory = next((text for name in DIRECTORY_VARIABLES if (text := os.environ.get(name))), "")
        if directory and not args.profiler_config:
            args.profiler_config = {"profiler": TORCH, "torch_profiler_dir": directory}
        found = read_settings(args.profiler_config)
        if found is not None and found.torch_profiler_dir:  # absolute: engine processes may have another working directory
            args.profiler_config = {**args.profiler_config, "torch_profiler_dir": found.torch_profiler_dir}

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        found = read_settings(config.args.profiler_config)
        return None if found is None else {"settings": found}

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        return NO_MEMORY
