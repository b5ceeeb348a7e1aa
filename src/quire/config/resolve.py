"""Resolve arguments to a frozen `Config`: find the files, read the facts, then apply small rules in order.

A rule only decides what the user left open. Unsupported combinations are rows in `conflicts.py` and in features.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from quire.config.args import EngineArgs, wants_mistral
from quire.config.config import Config, Policy
from quire.config.conflicts import refuse_conflicts
from quire.config.facts import DeviceFacts, ModelFacts, count_experts, read_facts
from quire.config.families import overflows_in_float16
from quire.config.features import FEATURES
from quire.config.fields import FLOAT_NAMES
from quire.config.hf import read_json
from quire.config.quantization import Quantization, choose_quantization
from quire.config.speculative import HEADS, ON_DEVICE, SpeculativeConfig
from quire.features.pooling.sentence_files import read_sentence_files
from quire.features.speculation.resolve import find_drafting
from quire.files.in_use import InUse
from quire.files.resolve import TEKKEN, ModelFiles, check_on_disk, is_bare_name, resolve_model
from quire.types.cache import DTYPE_BYTES
from quire.types.errors import ConfigError, RequestError
from quire.types.sampling import LogprobsMode, SamplingParams

logger = logging.getLogger(__name__)

# sampling defaults of a checkpoint: generation_config.json's name -> SamplingParams' name
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
STATES_SHARE = 0.25  # of device memory for recurrent states


def resolve(
    args: EngineArgs,
    find_device: Callable[[], str],
    describe: Callable[[str], DeviceFacts],
    facts: ModelFacts | None = None,
    serving: bool = False,
    complete: Callable[[ModelFacts], ModelFacts] | None = None,
    fetch: bool = True,
) -> Config:
    """Return the configuration of an engine.

    find_device, describe: return the device of `auto`, and the facts of a device. Both may import torch, so they are called
    after everything that can fail without it.
    facts: of the model, if they are known
    serving: optimize for latency under load; otherwise for throughput
    complete: completes facts from the model's code, if transformers runs the model
    fetch: an engine is going to run: mark the model's files as in use, and fetch the weights of a draft model. Otherwise only
        local ones are read
    """
    facts = facts or find_facts(args)
    args = with_whole_prompts(with_tekken(args, facts), facts)
    sampling = choose_sampling(args, facts)
    length, explicit = choose_length(args, facts)
    device = describe(choose_device(args, find_device))
    facts = facts if complete is None else complete(facts)
    owners = 1 if device.one_memory else args.tensor_parallel_size
    max_batched_tokens, max_seqs = choose_batch(args, default_batch(device, serving, facts, owners), length)
    quantization = choose_quantization(args.quantization, facts.quantization, facts.files.format == "gguf")
    keep_quantized = choose_keep_quantized(args, facts, device, quantization)
    drafting = find_drafting(args, facts, fetch, wants_weights(args))
    config = Config(
        args=args,
        facts=facts,
        device=device.kind,
        device_facts=device,
        dtype=choose_dtype(args, facts, device),
        quantization=quantization,
        keep_quantized=keep_quantized,
        page_size=args.block_size or (device.quantized_page_size if keep_quantized else device.page_size),
        max_model_len=length,
        max_model_len_explicit=explicit,
        max_batched_tokens=max_batched_tokens,
        steps_follow_load=serving and choose_following(args, facts, device),
        max_seqs=max_seqs,
        chunk_cap=args.long_prefill_token_threshold or None,
        chunked=args.enable_chunked_prefill,
        prefix_caching=args.enable_prefix_caching,
        policy=cast(Policy, args.scheduling_policy),
        speculation=drafting.asked,
        depth=choose_depth(args, device, drafting.asked),
        seed=args.seed,
        max_logprobs=args.max_logprobs,
        logprobs_mode=cast(LogprobsMode, args.logprobs_mode),
        default_sampling=sampling,
        served_names=choose_names(args),
        max_loras=args.max_loras if args.enable_lora else 0,
        max_cpu_loras=(args.max_cpu_loras or args.max_loras) if args.enable_lora else 0,
        draft_facts=drafting.facts,
        text_drafter=drafting.by_text,
        draft_head=drafting.head,
        features={each.name: found for each in FEATURES if (found := each.resolve(args, facts)) is not None},
        in_use=InUse(each.files for each in (facts, *drafting.models)) if fetch else None,
    )
    warn_without_adapters(args)
    refuse_conflicts(config)
    return config


def check_model(args: EngineArgs) -> None:
    """Raise what is wrong with a local model.

    A name without an organisation is usually a mistake, so its small files are fetched from the hub.
    """
    if is_bare_name(args.model):
        find_files(args, weights=False)
    else:
        check_on_disk(args.model, wants_weights(args), wants_mistral(args))


def wants_weights(args: EngineArgs) -> bool:
    return args.load_format != "dummy" and args.distributed_executor_backend != "fake"


def find_files(args: EngineArgs, weights: bool) -> ModelFiles:
    """Return the model's files, fetched if necessary; without `weights`, only configuration and tokenizer."""
    return resolve_model(
        args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        token=args.hf_token,
        weights=weights,
        mistral=wants_mistral(args),
    )


def find_facts(args: EngineArgs) -> ModelFacts:
    return read_facts(find_files(args, wants_weights(args)), args.hf_overrides, lenient=True)


def with_tekken(args: EngineArgs, facts: ModelFacts) -> EngineArgs:
    """Set `tokenizer` to the file tekken.json for `tokenizer_mode` mistral, so that every process reads it."""
    if args.tokenizer_mode != "mistral" or args.skip_tokenizer_init:
        return args
    where = facts.files.path
    if args.tokenizer is not None:
        where = resolve_model(args.tokenizer, revision=args.tokenizer_revision, weights=False).path
    file = where if where.name == TEKKEN else where / TEKKEN
    if not file.is_file():
        raise ConfigError(f"tokenizer_mode='mistral' requires {TEKKEN}; {where} has none. Remove tokenizer_mode")
    return replace(args, tokenizer=str(file.absolute()))


def with_whole_prompts(args: EngineArgs, facts: ModelFacts) -> EngineArgs:
    """An encoder's tokens see those after them: a prompt is never split, and nothing of it can be used for another."""
    return replace(args, enable_chunked_prefill=False, enable_prefix_caching=False) if facts.encoder else args


def choose_sampling(args: EngineArgs, facts: ModelFacts) -> dict[str, Any]:
    """Return the default sampling parameters: the model's, a directory's or none, updated by the overrides."""
    source = args.generation_config
    stored: Mapping[str, Any] = {}
    if source == "auto":
        stored = facts.generation
    elif source != "vllm":
        stored = read_json(Path(source).expanduser() / "generation_config.json")
    unknown = sorted(set(args.override_generation_config) - set(SAMPLING_DEFAULTS))
    if unknown:
        raise ConfigError(f"override_generation_config: unknown {', '.join(unknown)}; known are {', '.join(SAMPLING_DEFAULTS)}")
    merged = {**stored, **args.override_generation_config}
    values = {ours: merged[theirs] for theirs, ours in SAMPLING_DEFAULTS.items() if merged.get(theirs) is not None}
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(
            f"the default sampling parameters are wrong: {error}. Correct override_generation_config, or use "
            "generation_config='vllm' to ignore the model's own"
        ) from error
    return values


def choose_length(args: EngineArgs, facts: ModelFacts) -> tuple[int, bool]:
    if args.max_model_len is None or args.max_model_len == -1:
        return min(facts.max_position, trained_length(facts)), False
    return args.max_model_len, True


def trained_length(facts: ModelFacts) -> int:
    """Return the longest text of an encoder that the files of sentence-transformers name; it may be asked for longer ones."""
    files = read_sentence_files(facts.files.path) if facts.encoder and facts.files.path.is_dir() else None
    return facts.max_position if files is None else files.max_seq_length or facts.max_position


def choose_device(args: EngineArgs, find_device: Callable[[], str]) -> str:
    if args.distributed_executor_backend == "fake":
        return "cpu"
    return find_device() if args.device == "auto" else args.device


def choose_dtype(args: EngineArgs, facts: ModelFacts, device: DeviceFacts) -> str:
    if args.dtype != "auto":
        return FLOAT_NAMES.get(args.dtype, args.dtype)
    stable = not overflows_in_float16(facts.hf)
    return device.dtype or ("float16" if facts.dtype == "float16" and stable else "bfloat16")


def choose_keep_quantized(
    args: EngineArgs, facts: ModelFacts, device: DeviceFacts, quantization: Quantization | None = None
) -> bool:
    """Return whether quantized weights stay quantized. An explicit dtype dequantizes them, unless the device supports both."""
    quantized = quantization is not None or facts.files.format == "gguf"
    return quantized and bool(device.keeps) and (device.always_keeps or args.dtype == "auto")


def default_batch(device: DeviceFacts, serving: bool, facts: ModelFacts | None = None, ranks: int = 1) -> tuple[int, int]:
    """Return the default tokens and requests per step. Recurrent states of all slots take at most a quarter of the memory,
    since they are allocated for all slots. ranks: that divide each state and have memory of their own"""
    tokens, seqs = device.batch
    if facts is not None and facts.states and device.total_bytes:
        each = sum(state.bytes(DTYPE_BYTES[facts.dtype]) for state in facts.states)
        seqs = max(1, min(seqs, ranks * int(STATES_SHARE * device.total_bytes) // each))
    return min(tokens, device.served_tokens or tokens) if serving else tokens, seqs


def choose_batch(args: EngineArgs, default: tuple[int, int], max_model_len: int) -> tuple[int, int]:
    """Return tokens and requests per step. A default adapts to a given value: all requests, and unchunked prompts, must fit."""
    tokens, seqs = args.max_num_batched_tokens, args.max_num_seqs
    if seqs is None:
        seqs = min(default[1], tokens) if tokens is not None else default[1]
    if tokens is None:
        tokens = max(min(default[0], seqs * max_model_len), seqs)
        if not args.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    return tokens, seqs


def choose_following(args: EngineArgs, facts: ModelFacts, device: DeviceFacts) -> bool:
    """Return whether the budget of a step follows the load. Not for mixtures of experts: short steps would read all experts
    for few tokens. If steps are timed, the measurement includes that."""
    experts = not device.times_steps and count_experts(facts) > 0
    return args.max_num_batched_tokens is None and args.enable_chunked_prefill and not experts


def choose_depth(args: EngineArgs, device: DeviceFacts, speculation: SpeculativeConfig | None) -> int:
    """Return the steps that are planned ahead. Heads read the states of every step, so there are none.

    In a pipeline every stage has a step in flight, unless a draft model or head waits for each. Ranks that draft do so after
    each step, all at the same time.
    """
    stages, method = args.pipeline_parallel_size, "" if speculation is None else speculation.method
    if stages > 1:
        usual = method not in ON_DEVICE
        return stages - 1 if (usual if args.async_scheduling is None else args.async_scheduling) else 0
    usual = device.overlaps and method not in (ON_DEVICE if args.tensor_parallel_size > 1 else HEADS)
    return int(usual if args.async_scheduling is None else args.async_scheduling)


def warn_without_adapters(args: EngineArgs) -> None:
    names = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_extra_vocab_size", "lora_dtype")
    given = [name for name in names if getattr(args, name) != getattr(EngineArgs, name)]
    if given and not args.enable_lora:
        logger.warning("%s: no effect without enable_lora", ", ".join(given))


def choose_names(args: EngineArgs) -> tuple[str, ...]:
    names = args.served_model_name or args.model
    return (names,) if isinstance(names, str) else tuple(names)
