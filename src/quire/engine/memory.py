"""The memory of an engine before it is started: sizes from file headers, or from a model that is built without weights.

What each feature needs is its `Feature.memory`; this module finds the `Sizes` that go into it. Importing it does not import
torch. Torch is imported where the model has to be built: for several ranks, LoRA adapters, and quantized weights whose files
are not on this machine.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.cache.layout import SNAPSHOTS_PER_SLOT, pages_for
from quire.config.config import Config
from quire.config.dequantized_copies import copied_gguf_values, copied_values, estimate_copied
from quire.config.draft_heads import DraftHead
from quire.config.facts import ModelFacts
from quire.config.features import FEATURES
from quire.config.memory import activation_bytes, cpu_weight_bytes, graph_bytes, packed_weight_bytes, parameter_parts
from quire.config.quantization import Quantization, choose_quantization, quantized_bytes, stays_quantized
from quire.config.speculative import MTP
from quire.device.registry import open_device
from quire.engine.layouts import cache_sizes, draft_quantized_layouts, model_share, state_bytes, text_drafter_config
from quire.engine.runners import bounded_facts
from quire.features.host import Memory, Sizes
from quire.features.media.host import has_rotary_axes
from quire.features.pooling.host import pooling_of
from quire.features.quantization.host import may_copy
from quire.files.gguf import GGUFTensor, read_gguf_shards
from quire.files.safetensors import TensorInfo, read_header
from quire.models.registry import find_family
from quire.types.cache import DTYPE_BYTES, CacheLayout

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quire.layers.parameter import WeightSlices

SCALE_BYTES = 4  # one for each output of a matrix that becomes fp8 while it is loaded


def feature_memory(config: Config, sizes: Sizes) -> dict[str, Memory]:
    """Return what each feature needs on one rank."""
    return {feature.name: feature.memory(config, sizes) for feature in FEATURES}


def rank_sizes(config: Config, build: bool = True) -> Sequence[Sizes]:
    """Return the sizes of every rank. Raises what the start of the engine would refuse about a rank's share of the model.

    build: build each rank's share of the model without weights, which takes seconds; else nothing is checked, and LoRA
        adapters are not counted
    """
    weights, _ = weights_of(config.facts, config.quantization, config.native_layouts, config.dtype)
    parts = parameter_parts(config.facts.hf)
    copied = largest_part(config, _count_copied(config)) if may_copy(config) else 0
    found = []
    for rank, (adapter, values) in enumerate(_build_ranks(config) if build else [(0, 0)] * config.world):
        # a draft model is whole on every rank of the first stage; a text drafter is an engine on the first rank
        drafts = _draft_sizes(config) if rank < (config.ranks if config.text_drafter is None else 1) else {}
        expert = weights * parts.expert // max(1, parts.total)
        found.append(Sizes(largest_part(config, weights), adapter, values, copied, expert, state=state_bytes(config), **drafts))
    return found


def weights_of(facts: ModelFacts, quantization: Quantization | None, keeps: frozenset[str], dtype: str) -> tuple[int, str]:
    """Return the bytes of all weights in memory, and the types they are stored in. keeps: see `DeviceFacts.keeps`."""
    element = DTYPE_BYTES[dtype]
    floats = facts.parameters * element
    if quantization is not None and find_family(facts) and stays_quantized(quantization, keeps):
        infos = _headers(facts)
        if quantization.online or not infos:
            total = _expected_bytes(facts, quantization, keeps, dtype)
        else:
            total = quantized_bytes(infos, quantization, keeps, element)
        return (total, f"{quantization.method}, the rest {dtype}") if total < floats else (floats, dtype)
    if keeps and facts.files.format == "gguf" and facts.files.weights:
        tensors = _gguf_tensors(facts)
        if "blocks" in keeps:
            return cpu_weight_bytes(tensors), "the file's blocks, repacked"
        return packed_weight_bytes(tensors, element, "experts" in keeps), f"4, 6 and 8 bits, the rest {dtype}"
    return floats, dtype


def largest_part(config: Config, weights: int) -> int:
    """Of all weights, return those of a rank in the stage with most layers."""
    layers = [len(stage) for stage in config.stage_layers] if config.stages > 1 else [1]
    return weights * max(layers) // (sum(layers) * config.ranks)


def reserved_graph_bytes(config: Config) -> int:
    """Return the bytes that the memory profile leaves to CUDA graphs."""
    if not open_device(config.device).records or config.args.enforce_eager:
        return 0
    drafts = 0 if config.speculation is None else config.speculation.num_speculative_tokens
    vocabulary = config.facts.vocab_size + config.adapter_tokens
    kinds = (2 if config.max_loras else 1) * (2 if has_rotary_axes(config) else 1)
    total = graph_bytes(config.max_seqs * (1 + drafts), vocabulary, kinds)
    return total + (graph_bytes(config.max_seqs, config.draft_facts.vocab_size) if config.draft_facts is not None else 0)


def collective_bytes(config: Config, link: str | None) -> int:
    """Return the bytes of a device for the collectives of its rank. link: between devices of a node; None: unknown."""
    nodes = -(-config.ranks // config.node_ranks)  # of a stage
    return open_device(config.device).collective_bytes(config.ranks, nodes, link)


def least_cache(config: Config, layout: CacheLayout) -> int:
    """Return the bytes of a rank's cache as configured, or of one longest request and all recurrent states."""
    args = config.args
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    pages = args.num_gpu_blocks_override or pages_for(layout, config.max_model_len, config.max_batched_tokens)
    per_slot = sum(memory.per_slot for memory in feature_memory(config, cache_sizes(config)).values())
    states = config.max_seqs * per_slot + (SNAPSHOTS_PER_SLOT * config.max_seqs + 1) * state_bytes(config)
    return int((pages + 1) * layout.bytes_per_page / model_share(config, layout)) + states


def draft_name(config: Config) -> str:
    """Return the name of the model or head that drafts; "" if none does."""
    if config.draft_head is not None:
        own = config.draft_head.method == MTP
        return f"{config.facts.files.name}'s own layers" if own else config.draft_head.facts.files.name
    facts = config.text_drafter or config.draft_facts
    return "" if facts is None else facts.files.name


def _draft_sizes(config: Config) -> dict[str, int]:
    """The draft fields of `Sizes`."""
    page = cache_sizes(config).draft_page
    if config.text_drafter is not None:
        facts, own = config.text_drafter, text_drafter_config(config, config.text_drafter)
        weights, _ = weights_of(facts, own.quantization, own.native_layouts, own.dtype)
        return {
            "draft_weights": weights,
            "draft_step": _draft_step(own, facts),
            "draft_cache": own.args.kv_cache_memory_bytes or 0,
        }
    if config.draft_head is not None:
        return {"draft_weights": _head_values(config.draft_head) * DTYPE_BYTES[config.dtype], "draft_page": page}
    if config.draft_facts is not None:
        facts = config.draft_facts
        quantization = choose_quantization(None, facts.quantization, facts.files.format == "gguf")
        weights, _ = weights_of(facts, quantization, draft_quantized_layouts(config, facts) or frozenset(), config.dtype)
        return {"draft_weights": weights, "draft_step": _draft_step(config, facts), "draft_page": page}
    return {}


def _head_values(head: DraftHead) -> int:
    """The weights of a head that has files of its own; a model's own layers are counted with the model."""
    if head.method == MTP:
        return 0
    counted = sum(info.elements for info in _headers(head.facts).values())
    return counted or (head.facts.parameters if head.facts.layers else 0)


def _draft_step(config: Config, facts: ModelFacts) -> int:
    return activation_bytes(
        facts.hf, element_bytes=DTYPE_BYTES[config.dtype], tokens=config.max_batched_tokens, rows=config.max_seqs
    )


def _count_copied(config: Config) -> int:
    """Weights of all ranks in matrices that can have a dequantized copy."""
    facts, quantization, keeps = config.facts, config.quantization, config.native_layouts
    if not find_family(facts) or not keeps:
        return 0
    if facts.files.format == "gguf":
        return copied_gguf_values(_gguf_tensors(facts)) if facts.files.weights else 0
    if quantization is None or quantization.online:
        return 0
    infos = _headers(facts)
    if not infos:
        return estimate_copied(parameter_parts(facts.hf).dense, quantization, keeps)
    return copied_values(infos, quantization, keeps)


def _headers(facts: ModelFacts) -> dict[str, TensorInfo]:
    return {name: info for path in facts.files.weights for name, info in read_header(path).items()}


def _gguf_tensors(facts: ModelFacts) -> list[GGUFTensor]:
    return [tensor for header in read_gguf_shards(facts.files.weights) for tensor in header.tensors.values()]


# ---- models that are built without weights ----------------------------------------------------------------------------------


def _build_ranks(config: Config) -> Iterator[tuple[int, int]]:
    """Of each rank, the bytes of one adapter and the weights in unquantized linear layers; (0, 0) without LoRA."""
    if config.world == 1 and not config.max_loras:  # nothing to check, and importing torch takes seconds
        yield 0, 0
        return
    import torch

    from quire.features.lora.packing import adapt
    from quire.load.load import check_fit

    for model in _build_shares(config):
        adapter = 0
        if config.max_loras:
            dtype, meta = getattr(torch, config.dtype), torch.device("meta")
            tabled = (config.max_loras, config.args.max_lora_rank) if config.device == "cuda" else None
            adapters = adapt(model, device=meta, dtype=dtype, tabled=tabled, more=config.adapter_tokens)
            adapter = adapters.bytes_of(config.args.max_lora_rank)
        check_fit(
            model,
            config.facts,
            dtype=config.dtype,
            keep_quantized=config.keep_quantized,
            quantization=config.quantization,
            keeps=config.native_layouts,
        )
        yield adapter, _linear_values(model) if config.max_loras else 0


def _build_shares(config: Config) -> "Iterator[nn.Module]":
    from quire.dist.stages import PipelineRank
    from quire.features.pooling.device import replace_head
    from quire.models.registry import build_model
    from quire.prepare.quantize import find_grain
    from quire.prepare.shard import shard
    from quire.prepare.stage import take_stage

    layers, expert_parallel, pooling = config.stage_layers, config.args.enable_expert_parallel, pooling_of(config)
    for rank in range(config.world):
        own = PipelineRank.of(rank, layers, config.ranks, expert_parallel)
        model = build_model(bounded_facts(config), config.args.model_impl)
        if pooling is not None:
            replace_head(model, pooling)
        exact = config.keep_quantized and config.device_facts.kind == "cpu"
        shard(model, own.position, _NoGroup(), find_grain(config.quantization), exact=exact)
        if config.stages > 1:
            take_stage(model, own.stage)
        yield model


class _NoGroup:
    """A group for models that are never run: only the shapes of its results matter."""

    def add(self, part: "Tensor") -> "Tensor":
        return part

    def join(self, part: "Tensor", total: int) -> "Tensor":
        return part.new_empty(*part.shape[:-1], total)

    def close(self) -> None:
        pass


def _linear_values(model: "nn.Module") -> int:
    from quire.layers.linear import Linear, Plain

    layers = (layer for layer in model.modules() if isinstance(layer, Linear) and isinstance(layer.method, Plain))
    return sum(layer.weight.numel() for layer in layers)


def _expected_bytes(facts: ModelFacts, quantization: Quantization, keeps: frozenset[str], dtype: str) -> int:
    """Bytes of quantized weights whose files are not here, and of floats that become fp8 while they are loaded."""
    import torch

    from quire.layers.quant.stored import Target
    from quire.load.load import lay_out
    from quire.models.registry import build_model

    target, model = Target(getattr(torch, dtype), keeps), build_model(facts)
    entries, _ = lay_out(model, None, torch.device("meta"), False, quantization, target)
    if quantization.online:
        return _online_bytes(model)
    return quantized_bytes(_expected_headers(entries), quantization, keeps, target.dtype.itemsize)


def _expected_headers(entries: "WeightSlices") -> dict[str, TensorInfo]:
    """The headers that files with the claimed tensors would have."""
    from quire.layers.quant.scheme import DTYPES

    names = {dtype: name for name, dtype in DTYPES.items()}
    found = {}
    for name, entry in entries.items():
        if entry is not None:
            dtype = entry.destinations[0].view.dtype
            info = TensorInfo(names[dtype], entry.shape, 0, 0)
            found[name] = TensorInfo(info.dtype, info.shape, info.elements * dtype.itemsize, 0)
    return found


def _online_bytes(model: "nn.Module") -> int:
    from quire.layers.quant.fp8 import OnlineExperts, OnlineLinear

    total = sum(parameter.nbytes for parameter in model.parameters())
    for layer in model.modules():
        if isinstance(getattr(layer, "method", None), OnlineExperts | OnlineLinear):
            for matrix in layer.parameters(recurse=False):
                if matrix.dim() > 1:
                    total -= matrix.nbytes - matrix.numel() - SCALE_BYTES * matrix.numel() // matrix.shape[-1]
    return total
