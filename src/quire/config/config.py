"""The configuration of an engine, resolved: what `resolve.py` makes and `conflicts.py` checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.args import EngineArgs, local_engines, shares_experts, split_layers
from quire.config.draft_heads import DraftHead
from quire.config.facts import DeviceFacts, ModelFacts, count_experts
from quire.config.quantization import Quantization
from quire.config.speculative import SpeculativeConfig
from quire.files.adapter import AdapterBounds
from quire.types.cache import DTYPE_BYTES, EIGHT_BITS
from quire.types.sampling import LogprobsMode

Policy = Literal["fcfs", "priority"]
CACHE_BYTES = {**DTYPE_BYTES, **dict.fromkeys(EIGHT_BITS.values(), 1)}  # of a number


@dataclass(frozen=True)
class Config:
    args: EngineArgs  # as given
    facts: ModelFacts
    device: str
    device_facts: DeviceFacts
    dtype: str
    quantization: Quantization | None  # of safetensors
    keep_quantized: bool  # what the files store in few bits stays so in memory, where the device can use it so
    page_size: int
    max_model_len: int
    max_model_len_explicit: bool  # asked for, so it must fit; otherwise it may shrink to what does
    max_batched_tokens: int
    steps_follow_load: bool  # that is a limit, and the usual step has less
    max_seqs: int
    chunk_cap: int | None
    chunked: bool
    prefix_caching: bool
    policy: Policy
    speculation: SpeculativeConfig | None
    depth: int  # steps planned ahead of the one whose results are awaited
    seed: int
    max_logprobs: int
    logprobs_mode: LogprobsMode
    default_sampling: dict[str, Any]  # SamplingParams fields
    served_names: tuple[str, ...]
    draft_facts: ModelFacts | None = None  # of a model that drafts
    text_drafter: ModelFacts | None = None  # of a model that drafts by text, whose vocabulary is another
    draft_head: DraftHead | None = None  # of a head that drafts from the model's states
    max_loras: int = 0  # adapters on the device; 0: none can be asked for
    max_cpu_loras: int = 0  # in the host's memory, those among them
    features: Mapping[str, Any] = field(default_factory=dict)  # by name: what `Feature.resolve` returned

    @property
    def adapter_bounds(self) -> AdapterBounds:
        facts = self.facts
        return AdapterBounds(self._adapter_numbers, self.args.max_lora_rank, facts.files.weights, facts.matrices or None)

    @property
    def _adapter_numbers(self) -> int | None:
        """More than these no adapter of this model can have: by its header one that has is refused before it is read. None =
        the model has no files to tell. Matrices may be stored in numbers that hold 16 others, and PEFT writes embedding and
        head up to four times."""
        facts, rank = self.facts, self.args.max_lora_rank
        widths, tokens = (16 if facts.quantization else 1) * facts.widths, facts.vocab_size + self.more_tokens
        both = 2 * (tokens + facts.hidden_size)  # embedding and head, one of which may have no file
        beside = 3  # for every row: bias, bias of lora_B, magnitude
        return (rank + beside) * (widths + both) + 8 * tokens * facts.hidden_size if facts.widths else None

    @property
    def more_tokens(self) -> int:
        """That adapters may add to the model's own."""
        return self.args.lora_extra_vocab_size if self.max_loras else 0

    @property
    def scheduled_tokens(self) -> int:
        """Most tokens of a step. Buffers hold `max_batched_tokens`."""
        return min(self.args.max_num_scheduled_tokens or self.max_batched_tokens, self.max_batched_tokens)

    @property
    def step_limit_name(self) -> str:
        """The argument that limits the tokens of a step."""
        return "max_num_batched_tokens" if self.args.max_num_scheduled_tokens is None else "max_num_scheduled_tokens"

    @property
    def draft_method(self) -> str:
        return "" if self.speculation is None else self.speculation.method

    @property
    def experts(self) -> int:
        """Experts of a layer; 0: the model has none."""
        return count_experts(self.facts)

    @property
    def local_engines(self) -> int:
        return local_engines(self.args)

    @property
    def shares_experts(self) -> bool:
        return shares_experts(self.args)

    @property
    def node_ranks(self) -> int:
        """Of the node that has most."""
        return -(-self.world // self.args.nnodes)

    @property
    def share_gpus(self) -> bool:
        """Whether several engines or ranks of this machine have one GPU."""
        several = local_engines(self.args) > 1 and self.args.kv_cache_memory_bytes is not None
        return several or 0 < self.device_facts.count < self.node_ranks

    @property
    def ranks(self) -> int:
        """Processes that share the model's matrices."""
        return self.args.tensor_parallel_size

    @property
    def kept_forms(self) -> frozenset[str]:
        """Of the forms that the device multiplies by as they are (`DeviceFacts.keeps`), those that are used: what adapters add
        goes between the matrices of an expert, which are floats then."""
        if not self.keep_quantized:
            return frozenset()
        return self.device_facts.keeps - {"experts"} if self.max_loras else self.device_facts.keeps

    @property
    def drafts_on_device(self) -> bool:
        return self.draft_facts is not None or self.draft_head is not None

    @property
    def stages(self) -> int:
        """Of a pipeline, one behind the other; each is shared by `ranks` processes."""
        return self.args.pipeline_parallel_size

    @property
    def world(self) -> int:
        """All processes that have a part of the model."""
        return self.ranks * self.stages

    @property
    def expert_ranks(self) -> int:
        """Processes that share the experts: all engines' together, if whole experts are divided (`enable_expert_parallel`)."""
        return self.ranks * (self.args.data_parallel_size if shares_experts(self.args) else 1)

    @property
    def divided(self) -> str:
        """What was asked for that needs several processes, in words."""
        sizes = {"tensor_parallel_size": self.ranks, "pipeline_parallel_size": self.stages}
        return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """Of each stage."""
        return split_layers(len(self.facts.layers), self.stages, self.args.pipeline_layer_partition)

    @property
    def cache_dtype(self) -> str:
        """Of keys and values: the model's, or of 8 bits."""
        return EIGHT_BITS.get(self.args.kv_cache_dtype, self.dtype)

    @property
    def state_bytes(self) -> int:
        """Of the recurrent states of one sequence."""
        return sum(state.bytes(DTYPE_BYTES[self.dtype]) for state in self.facts.states)

    @property
    def cache_bytes(self) -> int:
        """Of one number."""
        return CACHE_BYTES[self.cache_dtype]
