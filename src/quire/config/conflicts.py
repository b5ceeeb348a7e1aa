"""Settings that are not supported together: one row each, with what to change. All applicable rows are reported at once."""

import os

from quire.config.config import Config
from quire.config.devices import RAY_BUNDLES, SHARE
from quire.config.facts import count_heads
from quire.config.families import has_chunked_attention, overflows_in_float16
from quire.config.features import FEATURES
from quire.config.layer_patterns import staging_problem
from quire.features.host import Conflict
from quire.types.errors import ConfigError

CORE: tuple[Conflict, ...] = (
    Conflict(
        "length beyond the model",
        lambda c: c.max_model_len_explicit and c.max_model_len > c.facts.max_position,
        lambda c: (
            f"max_model_len {c.max_model_len} is longer than the {c.facts.max_position} positions of the model. Lower it, or, "
            "if the model supports more, set hf_overrides (max_position_embeddings or rope_parameters)"
        ),
    ),
    Conflict(
        "no room for a prompt",
        lambda c: c.max_model_len_explicit and c.max_model_len < 2,
        lambda c: f"max_model_len {c.max_model_len} leaves no room for a prompt and an answer; give at least 2",
    ),
    Conflict(
        "more scheduled tokens than a step holds",
        lambda c: (c.args.max_num_scheduled_tokens or 0) > c.max_batched_tokens,
        lambda c: (
            f"max_num_scheduled_tokens must be at most max_num_batched_tokens ({c.max_batched_tokens}); got "
            f"{c.args.max_num_scheduled_tokens}. Lower the first or raise the second"
        ),
    ),
    Conflict(
        "more requests than tokens",
        lambda c: c.max_seqs > c.scheduled_tokens,
        lambda c: (
            f"max_num_seqs {c.max_seqs} requires {c.step_limit_name} of at least that; got {c.scheduled_tokens}. "
            "Lower the first or raise the second"
        ),
    ),
    Conflict(
        "whole prompts do not fit a step",
        lambda c: not c.chunked and c.scheduled_tokens < c.max_model_len,
        lambda c: (
            f"without enable_chunked_prefill a whole prompt must fit in one step, but {c.step_limit_name} "
            f"{c.scheduled_tokens} is less than max_model_len {c.max_model_len}. Raise it, lower the length or chunk"
        ),
    ),
    Conflict(
        "a cap on chunks without chunks",
        lambda c: not c.chunked and c.chunk_cap is not None,
        lambda c: f"long_prefill_token_threshold {c.chunk_cap} needs enable_chunked_prefill; enable it, or drop the cap",
    ),
    Conflict(
        "a cap beyond the length",
        lambda c: c.chunk_cap is not None and c.chunk_cap > c.max_model_len,
        lambda c: f"long_prefill_token_threshold {c.chunk_cap} is above max_model_len {c.max_model_len}; it would do nothing",
    ),
    Conflict(
        "an encoder that generates",
        lambda c: c.facts.encoder and "pooling" not in getattr(c, "features", {}),
        lambda c: (
            f"{c.facts.architecture} is an encoder and generates no tokens; only pooling is supported for it, and this engine "
            "was started without"
        ),
    ),
    Conflict(
        "an encoder over stages",
        lambda c: c.facts.encoder and c.stages > 1,
        lambda c: (
            f"pipeline_parallel_size={c.stages} is not supported with {c.facts.architecture}, an encoder. Divide the model by "
            "tensor_parallel_size, or use data-parallel engines"
        ),
    ),
    Conflict(
        "an encoder by transformers",
        lambda c: c.facts.encoder and c.args.model_impl == "transformers",
        lambda c: f"model_impl='transformers' is not supported with {c.facts.architecture}, an encoder. Remove it",
    ),
    Conflict(
        "odd pages",
        lambda c: c.page_size & (c.page_size - 1) != 0,
        lambda c: f"block_size {c.page_size} must be a power of two, such as 16",
    ),
    Conflict(
        "chunks of half a page",
        lambda c: bool((c.facts.hf.get("attention_chunk_size") or 0) % c.page_size) and has_chunked_attention(c.facts.hf),
        lambda c: (
            f"block_size {c.page_size} does not divide the model's attention_chunk_size "
            f"({c.facts.hf['attention_chunk_size']}), and chunks are made of whole pages"
        ),
    ),
    Conflict(
        "float16 overflows",
        lambda c: c.dtype == "float16" and overflows_in_float16(c.facts.hf),
        lambda c: f"{c.facts.hf['model_type']} overflows in float16; use dtype bfloat16 or float32",
    ),
    Conflict(
        "GGUF weights from safetensors",
        lambda c: c.args.load_format == "safetensors" and c.facts.files.format == "gguf",
        lambda c: f"load_format is safetensors, but {c.facts.files.path.name} is a GGUF file; use auto",
    ),
    Conflict(
        "safetensors weights from GGUF",
        lambda c: c.args.load_format == "gguf" and c.facts.files.format != "gguf",
        lambda c: f"load_format is gguf, but {c.facts.files.name} is not a GGUF file; use auto",
    ),
    Conflict(
        "more nodes than ranks",
        lambda c: c.args.nnodes > c.world,
        lambda c: (
            f"nnodes={c.args.nnodes} machines need as many ranks, and there are {c.world} (tensor_parallel_size). "
            "Lower the first or raise the second"
        ),
    ),
    Conflict(
        "the engine is on another node",
        lambda c: c.args.node_rank > 0,
        lambda c: (
            f"node_rank={c.args.node_rank}: the engine is on machine 0, and this one has ranks of it: run quire serve "
            "with --headless on this machine"
        ),
    ),
    Conflict(
        "nodes of one process",
        lambda c: c.args.nnodes > 1 and c.args.distributed_executor_backend in ("uni", "fake"),
        lambda c: f"nnodes={c.args.nnodes}: {c.args.distributed_executor_backend} is one process, on one machine",
    ),
    Conflict(
        "engines of several nodes",
        lambda c: (  # the ranks of an engine on Ray know the number of its nodes
            c.args.data_parallel_size > 1
            and c.args.nnodes > 1
            and (c.args.distributed_executor_backend != "ray" or c.args.data_parallel_backend == "ray")
        ),
        lambda c: (
            f"data_parallel_size={c.args.data_parallel_size} is not supported with nnodes={c.args.nnodes}; leave nnodes out. "
            "Ray can divide every engine among machines: data_parallel_backend=ray with distributed_executor_backend=ray. "
            "Engines that are each on one machine may be on several: data_parallel_size_local"
        ),
    ),
    Conflict(
        "engines with ranks on Ray that Ray does not start",
        lambda c: (
            c.args.data_parallel_size > 1
            and c.args.distributed_executor_backend == "ray"
            and c.args.data_parallel_backend != "ray"
            and RAY_BUNDLES not in os.environ
        ),
        lambda c: (
            f"data_parallel_size={c.args.data_parallel_size} with distributed_executor_backend=ray requires that Ray starts "
            "the engines, too; set data_parallel_backend=ray"
        ),
    ),
    Conflict(
        "one engine on Ray",
        lambda c: c.args.data_parallel_backend == "ray" and c.args.data_parallel_size == 1,
        lambda c: (  # noqa: ARG005
            "data_parallel_backend=ray requires a data_parallel_size of at least 2; got 1. Raise it, or leave the backend out: "
            "distributed_executor_backend=ray divides one engine among the nodes of a Ray cluster"
        ),
    ),
    Conflict(
        "more engines here than there are",
        lambda c: (c.args.data_parallel_size_local or 0) > c.args.data_parallel_size,
        lambda c: (
            f"data_parallel_size_local={c.args.data_parallel_size_local} engines on this machine are more than all of them, "
            f"data_parallel_size={c.args.data_parallel_size}. Lower the first or raise the second"
        ),
    ),
    Conflict(
        "engines of another machine",
        lambda c: c.args.data_parallel_start_rank > 0,
        lambda c: (
            f"data_parallel_start_rank={c.args.data_parallel_start_rank}: engine 0 and the API are on machine 0, and this one "
            "has other engines: run quire serve with --headless on it"
        ),
    ),
    Conflict(
        "ranks of a model that transformers runs",
        lambda c: c.world > 1 and c.facts.by_transformers,
        lambda c: (
            f"{c.parallelism}: {c.facts.architecture} is run by transformers, and only models of Quire's families can be "
            "divided; leave it at 1"
        ),
        "by transformers",
        "tensor_parallel_size",
    ),
    Conflict(
        "ranks on a device that has none",
        lambda c: c.world > 1 and c.device not in ("cpu", "cuda"),
        lambda c: f"{c.parallelism} requires CPUs or CUDA GPUs; the device is {c.device}. Leave it at 1",
    ),
    Conflict(
        "more ranks than GPUs",
        lambda c: _count_missing_gpus(c) > 0 and os.environ.get(SHARE) != "1",
        lambda c: (
            f"{c.parallelism} needs {c.node_ranks} GPUs on this machine, one per rank, and {c.device_facts.count} are visible; "
            f"lower it, or make more visible (CUDA_VISIBLE_DEVICES). {SHARE}=1 lets ranks share a GPU, for tests"
        ),
    ),
    Conflict(
        "ranks in one process",
        lambda c: c.world > 1 and c.args.distributed_executor_backend in ("uni", "fake"),
        lambda c: (
            f"distributed_executor_backend={c.args.distributed_executor_backend!r} has one rank, {c.parallelism} requires "
            "more; leave one of them out"
        ),
    ),
    Conflict(
        "layers that cannot be divided",
        lambda c: not c.facts.encoder and bool(_why_no_stages(c)),
        lambda c: _why_no_stages(c),
    ),
    Conflict(
        "more ranks than heads",
        lambda c: c.ranks > count_heads(c.facts) and not _never_divided(c) and bool(c.facts.layers or not c.facts.states),
        lambda c: (
            f"tensor_parallel_size={c.ranks}: the model's {count_heads(c.facts)} attention heads cannot be divided among "
            f"that many ranks; use at most {count_heads(c.facts)}"
        ),
    ),
    Conflict(
        "a tokenizer with skip_tokenizer_init",
        lambda c: c.args.skip_tokenizer_init and c.args.tokenizer is not None,
        lambda c: f"tokenizer {c.args.tokenizer!r} was given together with skip_tokenizer_init; drop one of them",
    ),
    Conflict(
        "a template without a tokenizer",
        lambda c: c.args.skip_tokenizer_init and c.args.chat_template is not None,
        lambda c: "chat_template was given together with skip_tokenizer_init; drop one of them",  # noqa: ARG005
    ),
    Conflict(
        "stages of layers that need each other",
        lambda c: c.stages > 1 and bool(staging_problem(c.facts.hf)),
        lambda c: (
            f"pipeline_parallel_size {c.stages} is not supported with {c.facts.architecture}: {staging_problem(c.facts.hf)}. "
            "Use tensor_parallel_size"
        ),
    ),
)  # fmt: skip
CONFLICTS = (*CORE, *(row for feature in FEATURES for row in feature.conflicts))


def _count_missing_gpus(config: Config) -> int:
    """Return how many GPUs this machine lacks for its ranks. Ray and external launchers give each rank its GPU themselves."""
    count = config.device_facts.count
    if config.world == 1 or not count or config.args.distributed_executor_backend in ("ray", "external_launcher"):
        return 0
    return config.node_ranks - count


def _never_divided(config: Config) -> bool:
    """Return whether the model cannot be divided at all; other rows report the reason."""
    facts = config.facts
    return config.world > 1 and facts.by_transformers


def _why_no_stages(config: Config) -> str:
    if _never_divided(config):
        return ""
    try:
        config.stage_layers  # noqa: B018
    except ConfigError as error:
        return str(error)
    return ""


def refuse_conflicts(config: Config) -> None:
    found = [conflict.message(config) for conflict in CONFLICTS if conflict.applies(config)]
    if found:
        raise ConfigError(
            found[0] if len(found) == 1 else "\n".join(["these settings are not supported:", *(f"- {text}" for text in found)])
        )
