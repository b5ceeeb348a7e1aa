# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""All arguments of an engine: `LLM(...)`, `EngineArgs(...)` and the command line follow from these fields.

Names and defaults are vLLM's. A field that is None is decided by `resolve`, from the model and the device.
"""

import argparse
import dataclasses
import difflib
import functools
import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeVar

from quire.config import families, quantization_methods
from quire.config.classes import as_name
from quire.config.devices import check_device
from quire.config.features import FEATURES
from quire.config.fields import CLASS, FLAG, FLOATS, LIST, NAMES, NUMBER, OBJECT, REAL, TEXT, TOKEN, setting, spec_of
from quire.config.flags import add_flags, add_hidden_flags, kind_of
from quire.config.model_registry import share_classes
from quire.config.plugins import load_general
from quire.config.vllm_arguments import HINT_SHORT_FLAGS, HINTS, REFUSED, SHORT_FLAGS, refuse, replace_value, take_hint
from quire.features.determinism.host import DeterminismArgs
from quire.features.experts.host import ExpertArgs
from quire.features.kv_quant.host import CacheArgs
from quire.features.logits_processors.host import LogitsProcessorArgs
from quire.features.lora.host import LoRAArgs
from quire.features.media.host import MediaArgs
from quire.features.pooling.host import PoolingArgs
from quire.features.profiling.host import ProfilerArgs
from quire.features.quantization.host import WeightArgs
from quire.features.speculation.host import SpeculationArgs
from quire.features.structured.host import StructuredArgs
from quire.features.tiers.host import TierArgs
from quire.types.errors import ConfigError, NotSupported

PARTITION = "VLLM_PP_LAYER_PARTITION"  # environment variable of vLLM
OTHER_NAMES = {  # of arguments, in environment variables and in other engines
    "batch_invariant": "deterministic",
    "batch_invariance": "deterministic",
    "enable_batch_invariance": "deterministic",
    "enable_deterministic_inference": "deterministic",
}


def read_partition(text: str) -> tuple[int, ...]:
    """Return the layers of each stage of a text such as `8,12,12`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"pipeline_layer_partition must be how many layers each stage has, such as 8,12,12; got {text!r}")
    return tuple(int(part) for part in parts)


def split_layers(count: int, stages: int, partition: str | None = None) -> tuple[range, ...]:
    """Return the layers of each pipeline stage; raise ConfigError if they cannot be divided.

    Without a partition they are divided evenly; the first stage, which also embeds and samples, never has more than others.
    """
    if partition is not None:
        sizes = read_partition(partition)
        if len(sizes) != stages:
            raise ConfigError(
                f"pipeline_layer_partition {partition!r} is for {len(sizes)} stages, and pipeline_parallel_size is {stages}"
            )
        if sum(sizes) != count:
            raise ConfigError(
                f"pipeline_layer_partition {partition!r} divides {sum(sizes)} layers, and the model has {count}; "
                "they must add up to that"
            )
        return tuple(range(first, last) for first, last in pairwise(accumulate(sizes, initial=0)))
    if stages > max(count, 1):
        raise ConfigError(
            f"pipeline_parallel_size={stages}: the model's {count} layers cannot be divided among that many stages; use at "
            f"most {count}"
        )
    return tuple(range(count * stage // stages, count * (stage + 1) // stages) for stage in range(stages))


DEFAULT_MODEL = "smollm2"
_MODEL, _LENGTHS, _CACHE, _SCHEDULER, _OTHER = "model", "lengths and sampling", "cache and memory", "scheduler", "other"
_PROCESS = "engine process (servers and AsyncLLM)"
_RANKS = "several processes"


T = TypeVar("T", bound=type)


def _accepts_vllm_names(owner: T) -> T:
    """Let the constructor take vLLM's other names: hints are logged, arguments that are not built are refused with a reason."""
    make = owner.__init__  # type: ignore[misc]
    known = {field.name for field in dataclasses.fields(owner)}

    @functools.wraps(make)
    def init(self: Any, *args: Any, **values: Any) -> None:
        for name, value in values.items():
            if name in REFUSED:
                refuse(name, value)
            elif name in HINTS:
                take_hint(name, value)
            elif name not in known:
                raise ConfigError(f"unknown engine argument {name!r}{nearest(name, [*known, *HINTS, *REFUSED])}")
        make(self, *args, **{name: value for name, value in values.items() if name in known})

    owner.__init__ = init  # type: ignore[misc]
    return owner


@dataclass
class _CoreArgs:
    """Arguments that belong to no feature. Those of a feature are in its `host.py`."""

    model: str = setting(DEFAULT_MODEL, TEXT, _MODEL, "directory, .gguf file, hub id (also org/repo:Q4_K_M) or alias (smollm2)")
    tokenizer: str | None = setting(None, TEXT, _MODEL, "directory or hub id of another tokenizer; default: the model's")
    revision: str | None = setting(None, TEXT, _MODEL, "branch, tag or commit of the hub model")
    tokenizer_revision: str | None = setting(None, TEXT, _MODEL, "branch, tag or commit of the hub tokenizer")
    hf_overrides: dict[str, Any] = setting({}, OBJECT, _MODEL, "fields to replace in the model's config.json")
    hf_token: str | bool | None = setting(None, TOKEN, _MODEL, "hub token for private or gated models; default: HF_TOKEN")
    download_dir: str | None = setting(None, TEXT, _MODEL, "directory for files of the hub; default: the hub's cache")
    load_format: str = setting(
        "auto",
        TEXT,
        _MODEL,
        "format of the weights; dummy creates random ones",
        choices=("auto", "safetensors", "mistral", "gguf", "dummy"),
    )
    config_format: str = setting(
        "auto", TEXT, _MODEL, "hf reads config.json, mistral reads params.json and consolidated*.safetensors; auto: "
        "config.json if it exists", choices=("auto", "hf", "mistral"),
    )  # fmt: skip
    tokenizer_mode: str = setting(
        "auto", TEXT, _MODEL, "mistral reads tekken.json and formats chats like mistral-common; auto: tokenizer.json if "
        "it exists", choices=("auto", "hf", "slow", "mistral"),
    )  # fmt: skip
    model_impl: str = setting(
        "auto", TEXT, _MODEL, "model implementation; auto prefers quire", choices=("auto", "quire", "transformers")
    )
    model_classes: dict[str, str] = setting(
        {}, OBJECT, _MODEL, "classes of architectures, as module:Class; ModelRegistry.register_model adds to them"
    )
    dtype: str = setting(
        "auto", TEXT, _MODEL, "of weights and cache; auto: float32 on CPU, bfloat16 (or the checkpoint's float16) on CUDA",
        choices=("auto", *FLOATS),
    )  # fmt: skip
    device: str = setting("auto", TEXT, _MODEL, "cpu, cuda, or the device of a plug-in; auto: CUDA if available")
    enforce_eager: bool = setting(False, FLAG, _MODEL, "launch kernels one by one instead of replaying CUDA graphs")
    skip_tokenizer_init: bool = setting(False, FLAG, _MODEL, "no tokenizer: prompts and outputs are token ids")
    chat_template: str | None = setting(None, TEXT, _MODEL, "chat template, as a file or as text; default: the model's")
    served_model_name: str | list[str] | None = setting(None, NAMES, _MODEL, "names of the model in requests; default: model")

    max_model_len: int | None = setting(
        None, NUMBER, _LENGTHS, "maximum context of prompt and output; auto or -1: what fits", low=-1
    )
    seed: int = setting(0, NUMBER, _LENGTHS, "source of seeds for requests without one", low=0, high=2**64 - 1)
    max_logprobs: int = setting(20, NUMBER, _LENGTHS, "maximum of logprobs per request; -1: no limit", low=-1)
    logprobs_mode: str = setting(
        "raw_logprobs", TEXT, _LENGTHS, "logprobs before or after penalties and temperature",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )  # fmt: skip
    generation_config: str = setting(
        "auto", TEXT, _LENGTHS, "source of default sampling parameters: auto = the model, vllm = neutral, or a directory"
    )
    override_generation_config: dict[str, Any] = setting(
        {}, OBJECT, _LENGTHS, "default sampling parameters that override those"
    )

    gpu_memory_utilization: float = setting(
        0.92, REAL, _CACHE, "fraction of the device's memory for the engine", above=0.0, high=1.0
    )
    kv_cache_memory_bytes: int | None = setting(None, NUMBER, _CACHE, "bytes of the KV cache, instead of the fraction", low=1)
    block_size: int | None = setting(
        None,
        NUMBER,
        _CACHE,
        "tokens per cache page: a power of two; default: 16, with quantized weights on a CPU 32",
        low=1,
        high=256,
    )
    enable_prefix_caching: bool = setting(True, FLAG, _CACHE, "reuse cached pages of equal prompt prefixes")
    num_gpu_blocks_override: int | None = setting(None, NUMBER, _CACHE, "exact number of pages, for tests", low=1)

    max_num_batched_tokens: int | None = setting(
        None,
        NUMBER,
        _SCHEDULER,
        "maximum of tokens per step; default: by the device, and by the load when serving on a GPU",
        low=1,
    )
    max_num_scheduled_tokens: int | None = setting(
        None, NUMBER, _SCHEDULER, "most tokens that are scheduled in one step, where buffers are to hold more; default: "
        "max_num_batched_tokens", low=1,
    )  # fmt: skip
    max_num_seqs: int | None = setting(None, NUMBER, _SCHEDULER, "most requests in one step", low=1)
    enable_chunked_prefill: bool = setting(True, FLAG, _SCHEDULER, "cut long prompts into pieces that share steps with others")
    long_prefill_token_threshold: int = setting(
        0, NUMBER, _SCHEDULER, "most prompt tokens of one request per step; 0: no cap", low=0
    )
    scheduler_cls: Any = setting(None, CLASS, _SCHEDULER, "a subclass of quire.sched.scheduler.Scheduler to use instead of it")
    scheduling_policy: str = setting("fcfs", TEXT, _SCHEDULER, "who goes first", choices=("fcfs", "priority"))
    stream_interval: int = setting(1, NUMBER, _SCHEDULER, "tokens per streamed piece of an answer, after the first", low=1)
    async_scheduling: bool | None = setting(
        None, FLAG, _SCHEDULER, "plan a step while the last one runs; default: on with CUDA"
    )

    engine_dead_after: float = setting(
        10.0, REAL, _PROCESS, "restart an engine without a heartbeat for this many seconds", above=1.0
    )
    engine_hang_timeout: float = setting(
        300.0, REAL, _PROCESS, "restart an engine whose step takes this many seconds", above=0.0
    )
    engine_start_timeout: float = setting(1800.0, REAL, _PROCESS, "abort a start after this many seconds", above=0.0)
    max_engine_restarts: int = setting(6, NUMBER, _PROCESS, "maximum of restarts within engine_restart_window", low=0)
    engine_restart_window: float = setting(600.0, REAL, _PROCESS, "window in which restarts are counted, in seconds", above=0.0)

    warm_restart: bool | None = setting(
        None, FLAG, _PROCESS, "fork engines from a process that has imported what they need, so that a lost engine restarts "
        "fast; default: on in quire serve",
    )  # fmt: skip

    data_parallel_size: int = setting(
        1, NUMBER, _RANKS, "engines among which requests are distributed, each with the whole model, a cache and a device",
        low=1, high=64, short="-dp",
    )  # fmt: skip
    data_parallel_size_local: int | None = setting(
        None, NUMBER, _RANKS, "of these engines, how many are on this machine; default: all, or with --headless the rest",
        low=0, high=64, short="-dpl",
    )  # fmt: skip
    data_parallel_start_rank: int = setting(
        0, NUMBER, _RANKS, "with --headless: the number of the first engine on this machine", low=0, high=63, short="-dpr"
    )
    data_parallel_address: str = setting(
        "127.0.0.1", TEXT, _RANKS, "address of machine 0, to which the machines of other engines connect", short="-dpa"
    )
    data_parallel_rpc_port: int = setting(
        29550, NUMBER, _RANKS, "port of data_parallel_address", low=1, high=65535, short="-dpp"
    )
    data_parallel_backend: str = setting(
        "mp", TEXT, _RANKS, "mp: each machine starts its own engines; ray: Ray starts all of them, on any node of its cluster",
        choices=("mp", "ray"), short="-dpb",
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, NUMBER, _RANKS, "processes that share the model's matrices and attention heads", low=1,
        short="-tp",
    )  # fmt: skip
    pipeline_parallel_size: int = setting(
        1, NUMBER, _RANKS, "pipeline stages, each with some of the layers, which work on different steps", low=1,
        short="-pp",
    )  # fmt: skip
    pipeline_layer_partition: str | None = setting(
        None, TEXT, _RANKS, "layers of each stage, such as 8,12,12; default: VLLM_PP_LAYER_PARTITION, or evenly"
    )
    nnodes: int = setting(1, NUMBER, _RANKS, "machines of the ranks; quire serve runs on each of them", low=1, short="-n")
    node_rank: int = setting(0, NUMBER, _RANKS, "number of this machine; all but 0 run --headless", low=0, short="-r")
    master_addr: str = setting("127.0.0.1", TEXT, _RANKS, "address of machine 0, to which the others connect")
    master_port: int = setting(29501, NUMBER, _RANKS, "port of machine 0", low=1, high=65535)
    distributed_timeout_seconds: float | None = setting(
        None, REAL, _RANKS, "seconds that ranks wait for each other, to connect and in a step; default: "
        "engine_start_timeout to connect, engine_hang_timeout in a step", above=0.0,
    )  # fmt: skip
    numa_bind: bool = setting(False, FLAG, _RANKS, "bind every rank to the CPUs of one NUMA node: its GPU's, or in turn")
    numa_bind_nodes: list[str] | None = setting(None, LIST, _RANKS, "with numa_bind: the node of each rank on this machine")
    numa_bind_cpus: list[str] | None = setting(
        None, LIST, _RANKS, "with numa_bind: the CPUs of each rank on this machine instead, such as 0-15 16-31"
    )
    distributed_executor_backend: str | None = setting(
        None, TEXT, _RANKS,
        "auto and mp: one process per rank; ray: Ray starts those of other machines; external_launcher: "
        "torchrun or similar starts all, each runs the same script; uni: one process; fake: no model, for tests",
        choices=("auto", "mp", "ray", "external_launcher", "uni", "fake"),
    )  # fmt: skip

    require_plugins: bool = setting(
        False, FLAG, _OTHER, "do not start if a plug-in of an installed package fails, instead of skipping it"
    )
    disable_log_stats: bool = setting(False, FLAG, _OTHER, "no periodic throughput line")
    enable_mfu_metrics: bool = setting(
        False, FLAG, _OTHER, "estimate operations and bytes of memory traffic from the sizes of model and steps, for /metrics"
    )


@_accepts_vllm_names
@dataclass
class EngineArgs(
    PoolingArgs, ExpertArgs, MediaArgs, LoRAArgs, SpeculationArgs, LogitsProcessorArgs, StructuredArgs, CacheArgs, WeightArgs,
    TierArgs, ProfilerArgs, DeterminismArgs, _CoreArgs,
):  # fmt: skip
    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            optional = field.default is None
            value = replace_value(field.name, getattr(self, field.name))
            setattr(self, field.name, spec_of(field).check(field.name, value, optional))
        load_general(self.require_plugins)  # they may register what the following checks look up
        families.check_plugins(self.require_plugins)
        quantization_methods.check_plugins(self.require_plugins)
        self.model_classes = share_classes(self.model_classes)
        if self.scheduler_cls is not None:
            self.scheduler_cls = as_name("scheduler_cls", self.scheduler_cls)
        check_device(self.device)
        for feature in FEATURES:
            feature.check(self)
        if self.load_format == "mistral" and self.config_format == "hf":
            raise ConfigError("load_format='mistral' requires params.json; got config_format='hf'. Use config_format='mistral'")
        if not self.numa_bind and (self.numa_bind_nodes is not None or self.numa_bind_cpus is not None):
            raise ConfigError("numa_bind_nodes and numa_bind_cpus require numa_bind. Add it")
        if self.pipeline_parallel_size > 1 and self.pipeline_layer_partition is None:
            self.pipeline_layer_partition = os.environ.get(PARTITION) or None
        if self.pipeline_layer_partition is not None:
            read_partition(self.pipeline_layer_partition)

    @classmethod
    def from_kwargs(cls, **values: Any) -> "EngineArgs":
        """Return arguments by name. Unsupported names are refused with a reason, unknown ones with the nearest names."""
        return cls(**values)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field, with the field's default, to a program's own parser."""
        add_cli_arguments(parser)
        parser.set_defaults(**vars(EngineArgs()))
        return parser

    def create_engine_config(self, *_: Any, **__: Any) -> NoReturn:
        raise NotSupported("EngineArgs.create_engine_config is not available: use from_engine_args", "create_engine_config")

    def create_model_config(self, *_: Any, **__: Any) -> NoReturn:
        raise NotSupported("EngineArgs.create_model_config is not available: see LLM.model_config", "create_model_config")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        return cls.from_cli(args)

    @classmethod
    def from_cli(cls, namespace: argparse.Namespace) -> "EngineArgs":
        """Return the arguments of a namespace, which has only the flags of the command line; defaults are in the fields."""
        names = {field.name for field in dataclasses.fields(cls)} | set(REFUSED) | set(HINTS)
        return cls.from_kwargs(**{name: value for name, value in vars(namespace).items() if name in names})


def one_at_a_time(args: EngineArgs) -> EngineArgs:
    """Return the arguments for commands with one request at a time: max_num_seqs is 1 unless the user sets it."""
    return dataclasses.replace(args, max_num_seqs=args.max_num_seqs or 1)


def local_engines(args: EngineArgs) -> int:
    """Return the engines of data_parallel_size that this machine starts. Ray starts its engines itself."""
    if args.data_parallel_backend == "ray":
        return 0
    return args.data_parallel_size if args.data_parallel_size_local is None else args.data_parallel_size_local


def node_ranks(args: EngineArgs) -> int:
    """Return the ranks of one engine on the node that has most. torchrun sets LOCAL_WORLD_SIZE to its own."""
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    local = os.environ.get("LOCAL_WORLD_SIZE", "") if args.distributed_executor_backend == "external_launcher" else ""
    return int(local) if local.isdecimal() and 0 < int(local) <= ranks else -(-ranks // args.nnodes)


def wants_mistral(args: EngineArgs) -> bool | None:
    """Return whether params.json and consolidated*.safetensors are read; None: if there is no config.json."""
    if "mistral" in (args.config_format, args.load_format):
        return True
    return False if args.config_format == "hf" else None


def connect_timeout(args: EngineArgs) -> float:
    """Return the seconds that ranks wait for other machines to connect."""
    return args.distributed_timeout_seconds or args.engine_start_timeout


def step_timeout(args: EngineArgs) -> float:
    """Return the seconds that ranks wait for each other in a step."""
    return args.distributed_timeout_seconds or args.engine_hang_timeout


def shares_experts(args: EngineArgs) -> bool:
    """Return whether several engines share the experts. A fake model has none."""
    several = args.enable_expert_parallel and args.data_parallel_size > 1
    return several and args.distributed_executor_backend != "fake"


def nearest(name: str, names: list[str]) -> str:
    """Return a hint: the name here of what others name so, or similar names, or names that begin with it."""
    other = OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))
    found = [full for full in names if full.lstrip("-") == other]
    found = found or difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not found and len(name.lstrip("-")) > 2:
        found = [full for full in names if full.startswith(name)][:3]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def add_cli_arguments(parser: argparse.ArgumentParser, taken: Collection[str] = ()) -> None:
    """Add one flag per field, except names in `taken`, which belong to another part of the command."""
    add_flags(parser, EngineArgs, "engine")
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with flags: long names without dashes, and values; the command line overrides it",
    )
    add_hidden_flags(parser, {name: kind for name, (_, kind) in HINTS.items()}, HINT_SHORT_FLAGS, taken)
    add_hidden_flags(parser, {name: kind_of(harmless) for name, (_, harmless) in REFUSED.items()}, SHORT_FLAGS, taken)
