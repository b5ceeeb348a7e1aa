"""Make a rank of a pipeline: its connections to the other ranks, and its stage's runner."""

import socket
from collections.abc import Mapping

from quire.cache.layout import stage_layout
from quire.config.config import Config
from quire.device.base import Device
from quire.dist.channel import Shape
from quire.dist.mesh import share_layers
from quire.dist.shared_memory import Watch
from quire.dist.stages import PipelineRank, Ring, join_ring
from quire.engine.runners import bounded_facts, make_device_drafter, make_parts, runner_settings
from quire.features.lora.device import LoRAPart
from quire.runner.settings import DTYPES
from quire.runner.stage import StageRunner


def join_pipeline(
    config: Config,
    device: Device,
    rank: int,
    memory: int,
    peers: Mapping[int, socket.socket],
    watch: Watch,
    remote: Mapping[int, socket.socket],
) -> Ring:
    """Connect to the other ranks. memory, peers, remote: shared memory, and sockets of this node and of others."""
    own = PipelineRank.of(rank, config.stage_layers, config.ranks, config.args.enable_expert_parallel)
    places = config.depth + 2  # slots of the channel: steps in flight, and one more
    shape = Shape(places, config.max_batched_tokens, config.facts.hidden_size, DTYPES[config.dtype])
    return join_ring(device, own, shape, memory, peers, watch, remote)


def make_stage_runner(config: Config, device: Device, ring: Ring) -> StageRunner:
    """Return the runner of a stage. Drafters run where tokens are drawn: whole on each rank of the first stage."""
    drafts = config.drafts_on_device and ring.own.stage.first
    drafter = make_device_drafter(config) if drafts else None
    whole = config.draft_head is not None and bool(config.draft_head.facts.layers)
    facts, own, position = bounded_facts(config), ring.own.stage.own, ring.own.position
    layers, parts = share_layers(facts.layers, position), make_parts(config, device, position, ring.group, drafter=drafter)
    lora = next((part for part in parts if isinstance(part, LoRAPart)), None)
    return StageRunner(
        facts,
        runner_settings(config, enforce_eager=drafts or whole),
        stage_layout(layers, own, config.page_size, config.cache_bytes),
        device=device,
        ring=ring,
        layers=[layers[index] for index in own],
        whole=whole,
        parts=parts,
        before_cut=None if lora is None else lora.note_whole_model,
    )
