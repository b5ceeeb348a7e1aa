"""Make the runner of an engine, or of a rank, from its configuration. Importing this file does not import torch."""

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from quire.cache.layout import make_layout
from quire.config.config import Config
from quire.config.facts import ModelFacts
from quire.config.features import FEATURES
from quire.config.host import count_threads, limit_thread_spinning
from quire.device.base import Device
from quire.device.registry import open_device
from quire.dist.mesh import ALONE, Position, share_layers
from quire.engine.layouts import draft_layout, draft_quantized_layouts, whole_layout
from quire.features.base import StepPart
from quire.features.experts.host import read_eplb
from quire.progress import doing

if TYPE_CHECKING:
    from quire.dist.collectives import Group, RankGroup
    from quire.dist.shared_memory import PeerWatch
    from quire.features.experts.exchange import SharedExperts
    from quire.features.experts.peers import PeerLinks
    from quire.features.speculation.device.drafter import DeviceDrafter
    from quire.runner.settings import RunnerSettings
    from quire.runner.step import Runner


def import_torch() -> None:
    """Import torch; the first import decides how its threads wait."""
    limit_thread_spinning()
    with doing("importing torch"):
        import torch  # noqa: F401


def start_device(config: Config, rank: int = 0) -> Device:
    """Open the device. Ranks other than the first have already selected theirs."""
    import torch

    device = open_device(config.device)
    if config.world > 1 and not rank:
        device.take_rank(rank)
    device.start()
    if config.world > 1:
        torch.set_num_threads(count_threads(ranks=config.node_ranks))
    return device


def bounded_facts(config: Config) -> ModelFacts:
    """Return the facts with max_position = max_model_len: RoPE scaling may depend on the longest context."""
    return replace(config.facts, max_position=config.max_model_len)


def make_runner(
    config: Config,
    device: Device,
    position: Position = ALONE,
    group: "RankGroup | None" = None,
    exchange: "SharedExperts | None" = None,
) -> "Runner":
    """Return the runner of the whole model, or of a rank's share of it."""
    from quire.runner.step import Runner

    facts = bounded_facts(config)
    layout = make_layout(share_layers(facts.layers, position), config.page_size, config.cache_bytes, facts.without_pages)
    drafter = make_device_drafter(config) if config.drafts_on_device else None
    parts = make_parts(config, device, position, group, exchange, drafter)
    settings = runner_settings(config, enforce_eager=exchange is not None)  # a CUDA graph cannot wait for another engine
    return Runner(facts, settings, layout, device=device, parts=parts, position=position, group=group)


def make_parts(
    config: Config,
    device: Device,
    position: Position,
    group: "Group | None",
    exchange: "SharedExperts | None" = None,
    drafter: "DeviceDrafter | None" = None,
) -> "list[StepPart]":
    """Return the device halves of the features that are on, in the order of FEATURES.

    drafter: None: the plans bring draft tokens, or another pipeline stage drafts.
    """
    from quire.runner.settings import DTYPES

    args, dtype, parts = config.args, DTYPES[config.dtype], list[StepPart]()
    if args.enable_eplb or exchange is not None:
        from quire.features.experts.device import ExpertsPart

        eplb = read_eplb(args.eplb_config, args.num_redundant_experts) if args.enable_eplb else None
        parts.append(ExpertsPart(position, group, eplb, exchange))
    for feature in FEATURES:
        if (options := feature.part_options(config)) is not None:
            module, name = feature.part.split(":")
            parts.append(getattr(import_module(module), name)(device, dtype, **options))
    if config.speculation is not None:
        from quire.features.speculation.device.part import SpeculationPart

        parts.append(SpeculationPart(device, dtype, drafter, config.max_batched_tokens, config.facts.hidden_size))
    return parts


def join_expert_peers(config: Config, device: Device, ends: "PeerLinks", watch: "PeerWatch") -> "SharedExperts":
    """Connect a rank to the engines that share its experts. ends: connections of this rank."""
    from quire.features.experts.exchange import ExpertsGroup, SharedExperts
    from quire.runner.settings import DTYPES

    position = Position(ends.first, config.ranks * config.args.data_parallel_size)
    group = ExpertsGroup(position, ends.memory, ends.sockets(), watch)
    return SharedExperts(group, position, config.ranks, DTYPES[config.dtype], device.torch_device)


def runner_settings(config: Config, enforce_eager: bool = False) -> "RunnerSettings":
    """Return what is the same for every runner of an engine."""
    from quire.runner.settings import RunnerSettings, WeightSettings

    args, speculation = config.args, config.speculation
    return RunnerSettings(
        dtype=config.dtype,
        max_seqs=config.max_seqs,
        max_batched_tokens=config.max_batched_tokens,
        cache_dtype=config.cache_dtype,
        num_draft_tokens=0 if speculation is None else speculation.num_speculative_tokens,
        added_tokens=config.adapter_tokens,
        logprobs_mode=config.logprobs_mode,
        enforce_eager=args.enforce_eager or enforce_eager,
        fixed_order=bool(args.deterministic),
        weights=WeightSettings(
            args.load_format, config.seed, args.model_impl, config.keep_quantized, config.quantization, config.native_layouts
        ),
    )


def make_device_drafter(config: Config) -> "DeviceDrafter":
    """Return the drafter that every rank runs whole."""
    assert config.speculation is not None
    layout = whole_layout(config)
    head, most, args = config.draft_head, config.speculation.num_speculative_tokens, config.args
    own = draft_layout(config)
    if head is not None and own is None:
        from quire.features.speculation.device.heads import Medusa

        return Medusa(head, most, args.load_format, config.seed)
    facts = config.draft_facts if head is None else head.facts
    assert facts is not None and own is not None
    facts = replace(facts, max_position=config.max_model_len)
    group = next(i for i, group in enumerate(layout.groups) if group.kind == "full")
    if head is None:
        from quire.features.speculation.device.model import DraftModel

        return DraftModel(facts, own, group, most, args.load_format, config.seed, draft_quantized_layouts(config, facts))
    from quire.features.speculation.device.heads import LAYERS, HeadDrafter

    head = replace(head, facts=facts)
    return HeadDrafter(head, LAYERS[head.method], own, group, most, args.load_format, config.seed)
