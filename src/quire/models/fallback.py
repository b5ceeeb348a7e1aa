"""Any decoder that transformers knows, run through our attention and cache.

transformers builds the model and maps the checkpoint's tensors to it; its attention layers hand us queries, keys and values.
What cannot be right that way is refused (fallback_checks).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.attn.batch import AdapterRows, Batch
from quire.files.reading import told
from quire.layers.attention import Attention, keep
from quire.load.source import Source, read_whole
from quire.models.decoder import Decoder
from quire.models.fallback_checks import check_tokens_meet_in_attention_only, trace
from quire.models.fallback_interface import SERVED, WATCHED, install, transformers, without_bars
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

SHOWN = 10


@dataclass
class Step:
    """The batch that is being run, for the layers to find."""

    batch: Batch | None = None


@dataclass(frozen=True)
class Served:
    """Stands in for attention in one layer of the transformers model."""

    attention: Attention
    step: Step

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:  # noqa: ARG002
        assert self.step.batch is not None
        query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        out: Tensor = self.attention(query, key, value, self.step.batch, options.get("s_aux"))
        return out.view(1, *query.shape)


class Hidden:
    """A body's output as heads read it: hidden states, and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states  # [1, P, H]

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class Given(nn.Module):
    """In the place of the model below the head: hands the head the hidden states it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None  # [1, P, H]

    @property
    def decoder(self) -> "Given":
        """OPT's head reaches for it."""
        return self

    def forward(self, *_: Any, **__: Any) -> Hidden:
        assert self.hidden is not None
        return Hidden(self.hidden)


class Fallback(Decoder):
    """`trunk` gives hidden states. `head` is the whole model with `given` in its place: it scales and caps its logits."""

    recordable = False  # what transformers' layers do on the host is not known

    trunk: Any
    head: Any

    def __init__(self, facts: "ModelFacts") -> None:
        nn.Module.__init__(self)
        self.recurrents = []
        if any(layer.latent for layer in facts.layers):
            raise ModelError("latent attention (kv_lora_rank) is served by families of our own alone")
        self.config, self.kind = _find_class(facts)
        self.facts = facts
        self.step = Step()
        # experts are multiplied by a kernel that is only known to the meta device for bfloat16
        model = self._build(WATCHED, torch.bfloat16, torch.device("meta"), seed=0)
        calls, hidden = trace(model, facts.layers)
        self.paths = [call.path for call in calls]
        self.attentions = [Attention(call.spec) for call in calls]
        self._take(model)
        self._check_head(hidden)

    def fill(self, source: Source | None, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Weights from the source, by transformers' own rules for the checkpoint's names; without one, random ones."""
        model = self._build(SERVED, dtype, device, seed) if source is None else self._load(source, device, dtype)
        attending = [model.get_submodule(path) for path in self.paths]
        self._take(model)
        self.trunk.requires_grad_(False)
        self.head.requires_grad_(False)
        try:
            check_tokens_meet_in_attention_only(self.trunk, attending, self.facts.vocab_size, device)
        except ModelError as error:
            raise ModelError(f"{self.facts.architecture} cannot be run through transformers: {error}") from error
        for module, attention in zip(attending, self.attentions, strict=True):
            install(Served(attention, self.step), module)

    def forward(self, batch: Batch) -> Tensor:
        self.step.batch = batch
        out: Tensor = self.trunk(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)[0]
        self.step.batch = None
        return keep(out[0], batch)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:  # noqa: ARG002 (it has no room for any)
        self.given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        out: Tensor = self.head(input_ids=ids, use_cache=False).logits
        self.given.hidden = None
        return out[0].float()

    def _take(self, model: Any) -> None:
        """Parts the model between its hidden states and its head."""
        self.trunk, self.given = model.base_model, Given()
        if self.trunk is model:
            raise ModelError("it has no part that gives hidden states")
        setattr(model, model.base_model_prefix, self.given)
        self.head = model

    def _check_head(self, hidden: Tensor) -> None:
        try:
            count = self.logits(hidden).shape[-1]
        except Exception as error:
            raise ModelError(f"its head cannot be run alone ({told(error)})") from error
        if count != self.facts.vocab_size:
            raise ModelError(f"its head gives {count} logits, but its vocabulary has {self.facts.vocab_size} tokens")

    def _build(self, attention: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
        """The model with weights as transformers initializes them."""
        try:
            with torch.device(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                auto = transformers.AutoModelForCausalLM
                return auto.from_config(self.config, attn_implementation=attention, dtype=dtype).eval()
        except Exception as error:
            if isinstance(error, KeyError) and attention in error.args:
                raise ModelError("its attention does not go through transformers' attention interface") from error
            raise ModelError(f"transformers cannot build it ({told(error)})") from error

    def _load(self, source: Source, device: torch.device, dtype: torch.dtype) -> Any:
        tensors = read_whole(source)
        placement = {} if device.type == "cpu" else {"device_map": {"": device}}
        try:
            with without_bars():
                model, report = self.kind.from_pretrained(
                    None,
                    config=self.config,
                    state_dict=tensors,
                    dtype=dtype,
                    attn_implementation=SERVED,
                    output_loading_info=True,
                    **placement,
                )
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{self.facts.files.path} does not fit the model: {error}") from error
        wrong = {what: report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched") if report[f"{what}_keys"]}
        if wrong:
            found = "\n".join(f"  {what} ({len(names)}): {_list(names)}" for what, names in wrong.items())
            raise ModelError(f"{self.facts.files.path} does not fit the model:\n{found}")
        return model.eval()


def _list(names: Any) -> str:
    ordered = sorted(str(name) for name in names)
    return ", ".join(ordered[:SHOWN]) + (f", and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")


def _find_class(facts: "ModelFacts") -> tuple[Any, Any]:
    """transformers' configuration and class of the model."""
    kind = facts.hf.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        if facts.hf.get("auto_map"):
            raise ModelError("it needs code from its own repository, which is never run")
        raise ModelError(f"transformers {transformers.__version__} does not know the model_type {kind!r}")
    try:
        settings = {name: value for name, value in facts.hf.items() if name != "quantization_config"}  # it is given floats
        config = transformers.CONFIG_MAPPING[kind].from_dict(settings)
    except Exception as error:
        raise ModelError(f"transformers does not accept its configuration ({told(error)})") from error
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    found = classes.get(type(config), None)
    if found is None or found.__name__ != facts.architecture:
        served = f"; for {kind} that is {found.__name__}" if found is not None else ""
        raise ModelError(f"it is not a causal language model of transformers {transformers.__version__}{served}")
    return config, found
