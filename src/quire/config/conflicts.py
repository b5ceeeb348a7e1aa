"""Settings that are not supported together: one row each, with what to change. All that apply are reported at once."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.config.args import FLOAT_NAMES, local_engines, shares_experts
from quire.config.config import EIGHT_BITS, Config
from quire.config.eplb import read_eplb
from quire.config.facts import CHUNKED, count_experts, count_heads
from quire.config.uneven import whole_only
from quire.types.errors import ConfigError

OVERFLOWING = ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text")  # model types, in float16


SHARE = "QUIRE_CUDA_RANKS"  # environment


@dataclass(frozen=True)
class Conflict:
    name: str
    applies: Callable[[Config], bool]
    message: Callable[[Config], str]
    # of rows that keep whole kinds of models from something: which, and what users call it (docs/models.md lists them)
    of: Literal["", "without attention", "shared blocks", "by transformers"] = ""
    what: str = ""


def _tokens_of_step(c: Config) -> str:
    return "max_num_batched_tokens" if c.args.max_num_scheduled_tokens is None else "max_num_scheduled_tokens"


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "length beyond the model",
        lambda c: c.max_model_len_explicit and c.max_model_len > c.facts.max_position,
        lambda c: (
            f"max_model_len {c.max_model_len} is longer than the {c.facts.max_position} positions of the model. Lower it, or, "
            "if the model was stretched, say so with hf_overrides (max_position_embeddings or rope_parameters)"
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
            f"max_num_seqs {c.max_seqs} needs at least as many {_tokens_of_step(c)}, which are {c.scheduled_tokens}. "
            "Lower the first or raise the second"
        ),
    ),
    Conflict(
        "whole prompts do not fit a step",
        lambda c: not c.chunked and c.scheduled_tokens < c.max_model_len,
        lambda c: (
            f"without enable_chunked_prefill a whole prompt must fit in one step, but {_tokens_of_step(c)} "
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
        "odd pages",
        lambda c: c.page_size & (c.page_size - 1) != 0,
        lambda c: f"block_size {c.page_size} is not a power of two; 16 is a good one",
    ),
    Conflict(
        "a cache of another type",
        lambda c: c.args.kv_cache_dtype not in ("auto", c.dtype, *EIGHT_BITS),
        lambda c: (
            f"kv_cache_dtype {c.args.kv_cache_dtype} is not the model's {c.dtype}; use auto, fp8 for 8 bits, or "
            f"dtype={c.args.kv_cache_dtype} for both"
        ),
    ),
    Conflict(
        "scales that would not lie at whole numbers",
        lambda c: c.cache_bytes == 1 and any(x.sides * x.kv_heads * x.head_dim * c.page_size % 4 for x in c.facts.layers),
        lambda c: f"a cache of 8 bits needs pages of whole words of 4 bytes; block_size {2 * c.page_size} would do",
    ),
    Conflict(
        "latents of 8 bits",
        lambda c: c.cache_bytes == 1 and any(layer.latent for layer in c.facts.layers),
        lambda c: (
            f"kv_cache_dtype {c.args.kv_cache_dtype} is not built for latent attention (kv_lora_rank), whose cache is small; "
            "use auto"
        ),
    ),
    Conflict(
        "chunks of half a page",
        lambda c: bool((c.facts.hf.get("attention_chunk_size") or 0) % c.page_size) and c.facts.hf.get("model_type") in CHUNKED,
        lambda c: (
            f"block_size {c.page_size} does not divide the model's attention_chunk_size "
            f"({c.facts.hf['attention_chunk_size']}), and chunks are made of whole pages"
        ),
    ),
    Conflict(
        "float16 overflows",
        lambda c: c.dtype == "float16" and c.facts.hf.get("model_type") in OVERFLOWING,
        lambda c: f"{c.facts.hf['model_type']} overflows in float16; use dtype bfloat16 or float32",
    ),
    Conflict(
        "GGUF weights wanted from safetensors",
        lambda c: c.args.load_format == "safetensors" and c.facts.files.format == "gguf",
        lambda c: f"load_format is safetensors, but {c.facts.files.path.name} is a GGUF file; use auto",
    ),
    Conflict(
        "safetensors weights wanted from GGUF",
        lambda c: c.args.load_format == "gguf" and c.facts.files.format != "gguf",
        lambda c: f"load_format is gguf, but {c.facts.files.name} is not a GGUF file; use auto",
    ),
    Conflict(
        "steps planned ahead of drafts",
        lambda c: c.depth > 0 and (c.draft_head is not None or (c.stages > 1 and _drafts_by_weights(c))),
        lambda c: (
            f"async_scheduling plans steps before the last one's states are read, but {_method(c)} "
            "drafts from them; drop async_scheduling, or speculative_config"
        ),
    ),
    Conflict(
        "a draft model that ends early",
        lambda c: c.draft_facts is not None and c.draft_facts.max_position < c.max_model_len,
        lambda c: (
            f"the draft model has {c.draft_facts and c.draft_facts.max_position} positions, fewer than max_model_len "
            f"{c.max_model_len}; lower max_model_len to that, or take another draft model"
        ),
    ),
    Conflict(
        "drafts by text without one",
        lambda c: c.text_drafter is not None and c.args.skip_tokenizer_init,
        lambda c: (
            f"the draft model {c.speculation and c.speculation.model!r} has another vocabulary and drafts by text, for which "
            "both tokenizers are needed; drop skip_tokenizer_init, or take a draft model with the same vocabulary"
        ),
    ),
    Conflict(
        "more drafts than a step has room for",
        lambda c: c.speculation is not None and c.speculation.num_speculative_tokens >= c.scheduled_tokens,
        lambda c: (
            f"num_speculative_tokens {c.speculation and c.speculation.num_speculative_tokens} and a token before them do not "
            f"fit a step of {_tokens_of_step(c)} {c.scheduled_tokens}. Lower the first or raise the second"
        ),
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
        "an engine that is on another node",
        lambda c: c.args.node_rank > 0,
        lambda c: (
            f"node_rank={c.args.node_rank}: the engine is on machine 0, and this one has some of its ranks: run quire serve "
            "with --headless here"
        ),
    ),
    Conflict(
        "nodes of one process",
        lambda c: c.args.nnodes > 1 and c.args.distributed_executor_backend in ("uni", "fake"),
        lambda c: f"nnodes={c.args.nnodes}: {c.args.distributed_executor_backend} is one process, on one machine",
    ),
    Conflict(
        "engines of several nodes",
        lambda c: c.args.data_parallel_size > 1 and (c.args.nnodes > 1 or c.args.distributed_executor_backend == "ray"),
        lambda c: (
            f"data_parallel_size={c.args.data_parallel_size} is not supported with engines whose ranks are on several machines "
            "yet; leave it at 1. Engines that are each on one machine may be on several: data_parallel_size_local"
        ),
    ),
    Conflict(
        "more engines here than there are",
        lambda c: local_engines(c.args) > c.args.data_parallel_size,
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
            "has others: run quire serve with --headless here"
        ),
    ),
    Conflict(
        "models that draft on several GPUs",
        lambda c: (c.drafts_on_device or c.text_drafter is not None) and c.world > 1 and c.device != "cpu",
        lambda c: (
            f"speculative_config.method {_method(c)} is not supported with {c.divided} on {c.device} "
            "yet; use ngram or suffix, or leave one of them out"
        ),
    ),
    Conflict(
        "drafts of stages",
        lambda c: c.stages > 1 and c.draft_head is not None and bool(c.draft_head.taps),
        lambda c: (
            f"speculative_config.method {_method(c)} is not supported with {c.divided}: it reads the "
            "states of layers that other stages have. Take another method, or divide the model by tensor_parallel_size"
        ),
    ),
    Conflict(
        "drafts of recurrent layers",
        lambda c: c.speculation is not None and bool(c.facts.states) and (c.drafts_on_device or c.device != "cpu"),
        lambda c: (
            f"speculative_config.method {_method(c)} is not supported with {c.facts.architecture} on "
            f"{c.device}: its recurrent state goes back behind drafts that were wrong only where the host drafts, on a CPU. "
            + ('Take {"method": "ngram"} or {"method": "suffix"}' if c.device == "cpu" else "Leave speculative_config out")
        ),
    ),
    Conflict(
        "drafts by recurrent layers",
        lambda c: c.draft_facts is not None and bool(c.draft_facts.states),
        lambda c: (
            f"the draft model {c.draft_facts and c.draft_facts.architecture} has recurrent layers, whose states do not go back "
            "behind drafts that were wrong; take another draft model, or let it draft by text (use_heterogeneous_vocab: true)"
        ),
    ),
    Conflict(
        "ranks of recurrent layers",
        lambda c: bool(c.facts.states) and (c.stages > 1 or (c.world > 1 and (not c.facts.layers or c.device != "cpu"))),
        lambda c: (
            f"{c.divided}: the recurrent layers of {c.facts.architecture} are not divided yet; leave it at 1 (on a CPU, and "
            "with attention beside them, tensor_parallel_size divides all the rest)"
        ),
        "without attention",
        "tensor_parallel_size",
    ),
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
        "ranks of what transformers runs",
        lambda c: c.world > 1 and c.facts.by_transformers,
        lambda c: (
            f"{c.divided}: {c.facts.architecture} is run by transformers here, and only models of a family of our own can be "
            "divided; leave it at 1"
        ),
        "by transformers",
        "tensor_parallel_size",
    ),
    Conflict(
        "adapters of what transformers runs",
        lambda c: c.max_loras > 0 and c.facts.by_transformers,
        lambda c: (
            f"enable_lora: {c.facts.architecture} is run by transformers here, and adapters are added to models of a family "
            "of our own; leave it out"
        ),
        "by transformers",
        "enable_lora",
    ),
    Conflict(
        "few bits of what transformers runs",
        lambda c: c.quantization is not None and c.quantization.method != "mxfp4" and c.facts.by_transformers,
        lambda c: (
            f"{c.facts.files.name}: {c.facts.architecture} is run by transformers here, which takes floats only, and the "
            f"quantization is {c.quantization and c.quantization.method}; use a checkpoint of floats as it is"
        ),
        "by transformers",
        "quantization",
    ),
    Conflict(
        "8 bits of nothing",
        lambda c: c.cache_bytes == 1 and not c.facts.layers,
        lambda c: (
            f"kv_cache_dtype {c.args.kv_cache_dtype}: {c.facts.architecture} has no keys and values to keep in 8 bits; its "
            "states are float32. Leave it at auto"
        ),
    ),
    Conflict(
        "copies for nobody",
        lambda c: bool(c.args.dequantized_copies) and (c.device != "cuda" or c.dtype == "float32"),
        lambda c: (
            f"dequantized_copies are for GPUs of CUDA and types of 16 bits, and this is {c.dtype} on {c.device}; leave it out"
        ),
    ),
    Conflict(
        "copies on a GPU of several",
        lambda c: bool(c.args.dequantized_copies) and c.device == "cuda" and c.share_gpus,
        lambda _: (
            "dequantized_copies is not supported where several engines or ranks share one GPU: none sees what the others take; "
            "leave it out"
        ),
    ),
    Conflict(
        "ranks on a device that has none",
        lambda c: c.world > 1 and c.device not in ("cpu", "cuda"),
        lambda c: f"{c.divided} is built for CPUs and for GPUs of CUDA, and the device is {c.device}; leave it at 1",
    ),
    Conflict(
        "more ranks than GPUs",
        lambda c: c.world > 1 and 0 < c.device_facts.count < c.node_ranks and os.environ.get(SHARE) != "1",
        lambda c: (
            f"{c.divided} needs {c.node_ranks} GPUs on this machine, one for each rank, and {c.device_facts.count} can be seen "
            f"here; lower it, or let this process see more (CUDA_VISIBLE_DEVICES). {SHARE}=1 lets ranks share a GPU, for tests"
        ),
    ),
    Conflict(
        "GPUs of several machines",
        lambda c: c.world > 1 and c.device == "cuda" and bool(_why_no_nodes(c)),
        lambda c: f"{c.divided} on GPUs: {_why_no_nodes(c)}",
    ),
    Conflict(
        "ranks in one process",
        lambda c: c.world > 1 and c.args.distributed_executor_backend in ("uni", "fake"),
        lambda c: (
            f"distributed_executor_backend={c.args.distributed_executor_backend!r} has one rank, and {c.divided} asks for "
            "more; leave one of them out"
        ),
    ),
    Conflict("layers that cannot be divided so", lambda c: bool(_why_no_stages(c)), lambda c: _why_no_stages(c)),
    Conflict(
        "more ranks than heads",
        lambda c: c.ranks > count_heads(c.facts) and not _never_divided(c),
        lambda c: (
            f"tensor_parallel_size={c.ranks}: the model's {count_heads(c.facts)} attention heads cannot be divided among so "
            f"many ranks; {count_heads(c.facts)} is the most"
        ),
    ),
    Conflict(
        "no experts to divide",
        lambda c: (c.args.enable_expert_parallel or c.args.enable_eplb) and not count_experts(c.facts),
        lambda c: (
            f"{' and '.join(name for name in ('enable_expert_parallel', 'enable_eplb') if getattr(c.args, name))}: "
            f"{c.facts.architecture} has no experts; leave that out"
        ),
    ),
    Conflict(
        "more ranks than experts",
        lambda c: c.args.enable_expert_parallel and 0 < count_experts(c.facts) < c.expert_ranks,
        lambda c: (
            f"enable_expert_parallel: {count_experts(c.facts)} experts cannot be divided among {c.expert_ranks} ranks"
            + f" ({c.args.data_parallel_size} engines)" * (c.expert_ranks > c.ranks)
            + ("; without it each has a part of every expert" if c.ranks > 1 else "; without it each engine has all of them")
        ),
    ),
    Conflict(
        "experts shared by engines",
        lambda c: shares_experts(c.args) and bool(_why_not_shared(c)),
        lambda c: (
            f"enable_expert_parallel: the {c.args.data_parallel_size} engines of data_parallel_size share the experts then, "
            f"which is not supported with {_why_not_shared(c)} yet. Leave one of them out"
        ),
    ),
    Conflict(
        "experts that are not divided",
        lambda c: c.args.enable_eplb and count_experts(c.facts) > 0 and not _has_whole_experts(c),
        lambda c: (
            "enable_eplb needs whole experts on several ranks: enable_expert_parallel, which is "
            f"{'on' if c.args.enable_expert_parallel else 'off'}, and tensor_parallel_size above 1, which is {c.ranks}, or "
            f"data_parallel_size, which is {c.args.data_parallel_size}"
        ),
    ),
    Conflict(
        "copies of experts that nobody balances",
        lambda c: not c.args.enable_eplb and bool(c.args.num_redundant_experts or c.args.eplb_config),
        lambda c: "num_redundant_experts and eplb_config do nothing without enable_eplb; add it, or leave them out",  # noqa: ARG005
    ),
    Conflict(
        "more copies of experts than ranks",
        lambda c: (
            c.args.enable_eplb
            and _has_whole_experts(c)
            and 0 < count_experts(c.facts) * (c.expert_ranks - 1) < _copies(c)
        ),
        lambda c: (
            f"num_redundant_experts {_copies(c)}: with {c.expert_ranks} ranks each of the {count_experts(c.facts)} experts can "
            f"have {c.expert_ranks} copies, so {count_experts(c.facts) * (c.expert_ranks - 1)} is the most"
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
    Conflict(
        "a tokenizer that is not wanted",
        lambda c: c.args.skip_tokenizer_init and c.args.tokenizer is not None,
        lambda c: f"tokenizer {c.args.tokenizer!r} was given together with skip_tokenizer_init; drop one of them",
    ),
    Conflict(
        "a template without a tokenizer",
        lambda c: c.args.skip_tokenizer_init and c.args.chat_template is not None,
        lambda c: "chat_template was given together with skip_tokenizer_init; drop one of them",  # noqa: ARG005
    ),
    Conflict(
        "adapters in another type",
        lambda c: c.max_loras > 0 and FLOAT_NAMES.get(c.args.lora_dtype, c.args.lora_dtype) not in ("auto", c.dtype),
        lambda c: (
            f"lora_dtype {c.args.lora_dtype} differs from dtype {c.dtype}: adapters are added in the model's. Leave it at auto"
        ),
    ),
    Conflict(
        "stages of layers that need each other",
        lambda c: c.stages > 1 and bool(whole_only(c.facts.hf)),
        lambda c: (
            f"pipeline_parallel_size {c.stages} is not supported with {c.facts.architecture}: {whole_only(c.facts.hf)}. "
            "Use tensor_parallel_size"
        ),
    ),
    Conflict(
        "drafts of tokens that only adapters have",
        lambda c: c.more_tokens > 0 and c.speculation is not None and c.speculation.method not in ("ngram", "suffix"),
        lambda c: (
            f"lora_extra_vocab_size is not supported with the speculation method {_method(c)}: what "
            "drafts knows the model's own tokens only. Use ngram or suffix, or leave it out"
        ),
    ),
)  # fmt: skip


def _why_no_nodes(config: Config) -> str:
    """Ranks on GPUs are processes that this machine's `quire serve` or `LLM` starts, or one beside it on another machine, and
    those of a stage are together."""
    backend, nodes = config.args.distributed_executor_backend, config.args.nnodes
    if backend in ("ray", "external_launcher"):
        return f"distributed_executor_backend={backend!r} is for CPUs yet; leave it out"
    if nodes > 1 and config.stages % nodes:
        return (
            f"tensor_parallel_size is for GPUs of one machine. With nnodes={nodes}, pipeline_parallel_size has to be a "
            f"multiple of {nodes}, so that every machine has whole stages"
        )
    return ""


def _method(config: Config) -> str:
    return "" if config.speculation is None else config.speculation.method


def _drafts_by_weights(config: Config) -> bool:
    return config.drafts_on_device or config.text_drafter is not None


def _copies(config: Config) -> int:
    return read_eplb(config.args.eplb_config, config.args.num_redundant_experts).num_redundant_experts


def _why_not_shared(config: Config) -> str:
    """What else was asked for, or is there, that keeps engines from sharing experts."""
    args, facts = config.args, config.facts
    return " or ".join(
        what
        for what, there in (
            (f"the device {config.device} (CPUs can)", config.device != "cpu"),
            (f"pipeline_parallel_size={config.stages}", config.stages > 1),
            ("engines on other machines (data_parallel_size_local)", local_engines(args) < args.data_parallel_size),
            ("enable_lora", config.max_loras > 0),
            (f"{facts.architecture}, which transformers runs,", facts.by_transformers),
        )
        if there
    )


def _has_whole_experts(config: Config) -> bool:
    return config.args.enable_expert_parallel and config.expert_ranks > 1


def _never_divided(config: Config) -> bool:
    """Whatever the numbers; other rows say why, and by how much it could be divided would not be true of it."""
    facts = config.facts
    return config.world > 1 and (facts.by_transformers or bool(facts.states and not facts.layers))


def _why_no_stages(config: Config) -> str:
    if _never_divided(config) or (config.stages > 1 and config.facts.states):
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
