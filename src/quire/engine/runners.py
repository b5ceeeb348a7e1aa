"""The runner of an engine, or of a rank of one, as the configuration has it. Importing this file does not import torch."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.cache.layout import make_layout
from quire.config.config import Config
from quire.config.cores import threads_wanted
from quire.config.eplb import read_eplb
from quire.config.facts import ModelFacts
from quire.device.base import Device
from quire.device.registry import open_device
from quire.dist.mesh import ALONE, Position, share_layers
from quire.engine.layouts import draft_forms, draft_layout
from quire.features.base import StepPart
from quire.types.cache import CacheLayout

if TYPE_CHECKING:
    from quire.dist.collectives import Group
    from quire.dist.experts import SharedExperts
    from quire.dist.shared_memory import Watch
    from quire.engine.companions import Ends
    from quire.runner.draft.base import DeviceDrafter, Drafter
    from quire.runner.step import Runner


def start_device(config: Config, rank: int = 0) -> Device:
    """Other ranks than the first have taken theirs before."""
    import torch

    device = open_device(config.device)
    if config.world > 1 and not rank:
        device.take_rank(rank)
    device.start()
    if config.world > 1:
        torch.set_num_threads(threads_wanted(ranks=config.node_ranks))
    return device


def bounded_facts(config: Config) -> ModelFacts:
    """Rope tables are made for the longest context that can come, so a shorter one may choose finer factors."""
    return replace(config.facts, max_position=config.max_model_len)


def make_runner(
    config: Config,
    device: Device,
    position: Position = ALONE,
    group: "Group | None" = None,
    drafter: "Drafter | DeviceDrafter | None" = None,
    exchange: "SharedExperts | None" = None,
) -> "Runner":
    """Of the whole model, or of a rank's share of it."""
    from quire.runner.step import Runner

    facts = bounded_facts(config)
    return Runner(
        facts,
        device=device,
        layout=make_layout(share_layers(facts.layers, position), config.page_size, config.cache_bytes, bool(facts.states)),
        drafter=drafter,
        parts=make_parts(config, device),
        position=position,
        group=group,
        exchange=exchange,
        **runner_options(config),
    )


def make_parts(config: Config, device: Device) -> "list[StepPart]":
    """Return the device halves of the features that are on, in the order of FEATURES."""
    from quire.features.lora.device import LoRAPart
    from quire.runner.step import DTYPES

    dtype, parts = DTYPES[config.dtype], list[StepPart]()
    if config.max_loras:
        parts.append(LoRAPart(device, dtype, config.max_loras, config.args.max_lora_rank, config.more_tokens))
    return parts


def join_companions(config: Config, ends: "Ends", watch: "Watch") -> "SharedExperts":
    """ends: of one rank."""
    from quire.dist.experts import ExpertsGroup, SharedExperts
    from quire.runner.step import DTYPES

    position = Position(ends.first, config.ranks * config.args.data_parallel_size)
    group = ExpertsGroup(position, ends.memory, ends.sockets(), watch)
    return SharedExperts(group, position, config.ranks, DTYPES[config.dtype])


def runner_options(config: Config) -> dict[str, Any]:
    """What is the same for every runner of an engine."""
    args = config.args
    return {
        "dtype": config.dtype,
        "max_seqs": config.max_seqs,
        "max_batched_tokens": config.max_batched_tokens,
        "load_format": args.load_format,
        "seed": config.seed,
        "logprobs_mode": config.logprobs_mode,
        "model_impl": args.model_impl,
        "enforce_eager": args.enforce_eager,
        "keep_quantized": config.keep_quantized,
        "quantization": config.quantization,
        "keeps": config.kept_forms,
        "drafts": 0 if config.speculation is None else config.speculation.num_speculative_tokens,
        "cache_dtype": config.cache_dtype,
        "more_tokens": config.more_tokens,
        "eplb": read_eplb(args.eplb_config, args.num_redundant_experts) if args.enable_eplb else None,
    }


def make_device_drafter(config: Config, layout: CacheLayout) -> "DeviceDrafter":
    """It is whole on every rank."""
    assert config.speculation is not None
    head, most, args = config.draft_head, config.speculation.num_speculative_tokens, config.args
    own = draft_layout(config)
    if head is not None and own is None:
        from quire.runner.draft.medusa import Medusa

        return Medusa(head, most, args.load_format, config.seed)
    facts = config.draft_facts if head is None else head.facts
    assert facts is not None and own is not None
    facts = replace(facts, max_position=config.max_model_len)
    group = next(i for i, group in enumerate(layout.groups) if group.kind == "full")
    if head is None:
        from quire.runner.draft.model import DraftModel

        return DraftModel(facts, own, group, most, args.load_format, config.seed, draft_forms(config, facts))
    from quire.runner.draft.heads import LAYERS, HeadDrafter

    head = replace(head, facts=facts)
    return HeadDrafter(head, LAYERS[head.method], own, group, most, args.load_format, config.seed)
