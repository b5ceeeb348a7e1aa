"""The resolved configuration of an engine, made by `resolve.py` and checked by `conflicts.py`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from quire.config.args import EngineArgs, local_engines, node_ranks, shares_experts, split_layers
from quire.config.devices import SHARE
from quire.config.draft_heads import DraftHead
from quire.config.facts import DeviceFacts, ModelFacts, count_experts
from quire.config.layer_patterns import Kind
from quire.config.quantization import Quantization
from quire.config.speculative import SpeculativeConfig
from quire.files.adapter import AdapterBounds
from quire.files.in_use import InUse
from quire.types.cache import DTYPE_BYTES, EIGHT_BITS
from quire.types.sampling import LogprobsMode

Policy = Literal["fcfs", "priority"]
CACHE_BYTES = {**DTYPE_BYTES, **dict.fromkeys(EIGHT_BITS.values(), 1)}  # of one value


@dataclass(frozen=True)
class Config:
    args: EngineArgs  # as given
    facts: ModelFacts
    device: str
    device_facts: DeviceFacts
    dtype: str
    quantization: Quantization | None  # of safetensors
    keep_quantized: bool  # quantized weights stay quantized in memory, if the device can multiply by them
    page_size: int
    max_model_len: int
    max_model_len_explicit: bool  # set by the user, so it must fit; otherwise it may shrink
    max_batched_tokens: int
    steps_follow_load: bool  # max_batched_tokens is only the limit; the budget of a step follows the load
    max_seqs: int
    chunk_cap: int | None
    chunked: bool
    prefix_caching: bool
    policy: Policy
    speculation: SpeculativeConfig | None
    depth: int  # steps that are planned before the results of the current one arrive
    seed: int
    max_logprobs: int
    logprobs_mode: LogprobsMode
    default_sampling: dict[str, Any]  # SamplingParams fields
    served_names: tuple[str, ...]
    draft_facts: ModelFacts | None = None  # of a draft model
    text_drafter: ModelFacts | None = None  # of a draft model that drafts by text, since its vocabulary differs
    draft_head: DraftHead | None = None  # drafts from the model's hidden states
    max_loras: int = 0  # adapters on the device; 0: LoRA is off
    max_cpu_loras: int = 0  # in host memory, including those on the device
    features: Mapping[str, Any] = field(default_factory=dict)  # by name: what `Feature.resolve` returned
    in_use: InUse | None = field(default=None, compare=False, repr=False)  # marks of the models' files; None: nothing will run

    @property
    def adapter_bounds(self) -> AdapterBounds:
        facts = self.facts
        return AdapterBounds(self._adapter_values, self.args.max_lora_rank, facts.files.weights, facts.matrices or None)

    @property
    def _adapter_values(self) -> int | None:
        """Return the maximum of weights that an adapter of this model can have; None: the model has no files.

        A larger adapter is refused by its header. Matrices may be packed, 16 weights to a value, and PEFT writes embedding
        and head up to four times.
        """
        facts, rank = self.facts, self.args.max_lora_rank
        widths, tokens = (16 if facts.quantization else 1) * facts.widths, facts.vocab_size + self.adapter_tokens
        embeddings = 2 * (tokens + facts.hidden_size)  # embedding and head, one of which may have no file
        vectors = 3  # per row: bias, bias of lora_B, magnitude
        return (rank + vectors) * (widths + embeddings) + 8 * tokens * facts.hidden_size if facts.widths else None

    @property
    def adapter_tokens(self) -> int:
        """Return the tokens that adapters may add to the vocabulary."""
        return self.args.lora_extra_vocab_size if self.max_loras else 0

    @property
    def scheduled_tokens(self) -> int:
        """Return the token budget of a step. Buffers hold `max_batched_tokens`."""
        return min(self.args.max_num_scheduled_tokens or self.max_batched_tokens, self.max_batched_tokens)

    @property
    def step_limit_name(self) -> str:
        """Return the name of the argument that limits the tokens of a step."""
        return "max_num_batched_tokens" if self.args.max_num_scheduled_tokens is None else "max_num_scheduled_tokens"

    @property
    def draft_method(self) -> str:
        return "" if self.speculation is None else self.speculation.method

    @property
    def experts(self) -> int:
        """Return the experts of a layer; 0: the model has none."""
        return count_experts(self.facts)

    @property
    def local_engines(self) -> int:
        return local_engines(self.args)

    @property
    def shares_experts(self) -> bool:
        return shares_experts(self.args)

    @property
    def node_ranks(self) -> int:
        """Return the ranks of the node that has most."""
        return node_ranks(self.args)

    @property
    def share_gpus(self) -> bool:
        """Return whether several engines or ranks of this machine share a GPU."""
        several = local_engines(self.args) > 1 and self.args.kv_cache_memory_bytes is not None
        return several or (os.environ.get(SHARE) == "1" and 0 < self.device_facts.count < self.node_ranks)

    @property
    def ranks(self) -> int:
        """Return the tensor-parallel ranks."""
        return self.args.tensor_parallel_size

    @property
    def native_layouts(self) -> frozenset[str]:
        """Return the quantized layouts that are used without dequantizing (`DeviceFacts.keeps`).

        With LoRA, experts are dequantized, since adapters add to results between an expert's matrices.
        """
        if not self.keep_quantized:
            return frozenset()
        return self.device_facts.keeps - {"experts"} if self.max_loras else self.device_facts.keeps

    @property
    def drafts_on_device(self) -> bool:
        return self.draft_facts is not None or self.draft_head is not None

    @property
    def stages(self) -> int:
        """Return the pipeline stages; each has `ranks` processes."""
        return self.args.pipeline_parallel_size

    @property
    def world(self) -> int:
        """Return the number of all ranks of an engine."""
        return self.ranks * self.stages

    @property
    def expert_ranks(self) -> int:
        """Return the ranks that share the experts: those of all engines with `enable_expert_parallel`."""
        return self.ranks * (self.args.data_parallel_size if shares_experts(self.args) else 1)

    @property
    def parallelism(self) -> str:
        """Return the settings that require several processes, as text."""
        sizes = {"tensor_parallel_size": self.ranks, "pipeline_parallel_size": self.stages}
        return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """Return the layers of each stage."""
        return split_layers(self.facts.depth, self.stages, self.args.pipeline_layer_partition)

    @property
    def stage_attentions(self) -> tuple[range, ...]:
        """Return the attention layers of each stage, by their indices among all attention layers."""
        return self._stages_among("attention") if self.facts.kinds else self.stage_layers

    @property
    def stage_recurrents(self) -> tuple[range, ...]:
        """Return the recurrent layers of each stage, by their indices among all recurrent layers."""
        return self._stages_among("recurrent")

    def _stages_among(self, wanted: Kind) -> tuple[range, ...]:
        before = [0, *accumulate(kind in (wanted, "both") for kind in self.facts.kinds)]
        return tuple(range(before[stage.start], before[stage.stop]) for stage in self.stage_layers)

    @property
    def cache_dtype(self) -> str:
        """Return the dtype of keys and values: the model's, or an 8-bit one."""
        return EIGHT_BITS.get(self.args.kv_cache_dtype, self.dtype)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of one value in the cache."""
        return CACHE_BYTES[self.cache_dtype]
