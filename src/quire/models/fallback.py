"""Any decoder of transformers, run with our attention and KV cache.

transformers builds the model and maps the checkpoint's tensors to it; its attention layers call our attention. Models for which
that would be wrong are refused (`fallback_checks.py`). A model whose layers do not fit the KV cache can be recomputed: its
cache holds token ids only, and every step runs the whole sequence (`Recomputed`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.attn.backend import AttentionSpec
from quire.attn.batch import PLAIN, Batch, Tokens
from quire.files.reading import error_summary
from quire.layers.attention import Attention, take_final
from quire.load.source import Source, read_whole
from quire.models.decoder import Decoder
from quire.models.fallback_checks import (
    DIGITS,
    RADIX,
    SERVED,
    WATCHED,
    build,
    check_tokens_meet_in_attention_only,
    find_class,
    install,
    trace,
    without_bars,
)
from quire.ops.kv import kv_write
from quire.progress import doing
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

MAX_LISTED = 10


@dataclass
class Step:
    """The batch of the current step, which attention layers read."""

    batch: Batch | None = None
    turns: dict[nn.Module, int] = field(default_factory=dict)  # attention calls of each module in this step


@dataclass(frozen=True)
class Served:
    """Replaces the attention of one module, which calls it once or several times per step."""

    attentions: tuple[Attention, ...]
    step: Step

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:
        assert self.step.batch is not None
        turn = self.step.turns.get(module, 0)
        self.step.turns[module] = turn + 1
        attention, width = self.attentions[turn], value.shape[-1]
        size = attention.spec.head_dim
        query, key, value = (
            functional.pad(part[0].transpose(0, 1), (0, size - part.shape[-1])).contiguous() for part in (query, key, value)
        )
        out: Tensor = attention(query, key, value, self.step.batch, options.get("s_aux"))
        return out.view(1, *query.shape)[..., :width]


class Hidden:
    """The output of the model below the head: hidden states only."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states  # [1, P, H]

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class Given(nn.Module):
    """Replaces the model below the head: returns given hidden states to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None  # [1, P, H]

    @property
    def decoder(self) -> "Given":
        """The head of OPT reads this attribute."""
        return self

    def forward(self, *_: Any, **__: Any) -> Hidden:
        assert self.hidden is not None
        return Hidden(self.hidden)


class Fallback(Decoder):
    """`trunk` computes hidden states. `head` is the whole model with `given` instead of the trunk: it computes logits."""

    recordable = False  # what transformers' layers do on the host is not known

    trunk: Any
    head: Any

    def __init__(self, facts: "ModelFacts") -> None:
        nn.Module.__init__(self)
        self.recurrents = []
        if any(layer.latent for layer in facts.layers):
            raise ModelError("latent attention (kv_lora_rank) is not supported through transformers")
        self.config, self.kind = find_class(facts)
        self.facts = facts
        self.step = Step()
        # the kernel of experts supports the meta device in bfloat16 only
        model = self.build(WATCHED, torch.bfloat16, torch.device("meta"), seed=0)
        calls, hidden = trace(model, facts.layers)
        self.paths = [call.path for call in calls]
        self.attentions = [Attention(call.spec) for call in calls]
        self.take(model)
        self._check_head(hidden)

    def fill(self, source: Source | None, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Load weights by transformers' own rules for checkpoint names; without a source, initialize them randomly."""
        model = self.build(SERVED, dtype, device, seed) if source is None else self.load(source, device, dtype)
        attending = [model.get_submodule(path) for path in self.paths]
        self.take(model)
        self.trunk.requires_grad_(False)
        self.head.requires_grad_(False)
        try:
            with doing("checking that tokens meet in attention only"):
                check_tokens_meet_in_attention_only(self.trunk, attending, self.facts.vocab_size, device)
        except ModelError as error:
            raise ModelError(f"{self.facts.architecture} cannot be run through transformers: {error}") from error
        for path, module in zip(self.paths, attending, strict=True):
            own = (attention for at, attention in zip(self.paths, self.attentions, strict=True) if at == path)
            install(Served(tuple(own), self.step), module)

    def forward(self, batch: Batch) -> Tensor:
        self.step.batch = batch
        self.step.turns.clear()
        out: Tensor = self.trunk(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)[0]
        self.step.batch = None
        return take_final(out[0], batch)

    def logits(self, hidden: Tensor, tokens: Tokens) -> Tensor:  # noqa: ARG002 (transformers' heads know no LoRA)
        self.given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        out: Tensor = self.head(input_ids=ids, use_cache=False).logits
        self.given.hidden = None
        return out[0].float()

    def take(self, model: Any) -> None:
        """Split the model into trunk and head."""
        self.trunk, self.given = model.base_model, Given()
        if self.trunk is model:
            raise ModelError("it has no base model that returns hidden states")
        setattr(model, model.base_model_prefix, self.given)
        self.head = model

    def _check_head(self, hidden: Tensor) -> None:
        try:
            count = self.logits(hidden, PLAIN).shape[-1]
        except Exception as error:
            raise ModelError(f"its head cannot be run alone ({error_summary(error)})") from error
        if count != self.facts.vocab_size:
            raise ModelError(f"its head gives {count} logits, but its vocabulary has {self.facts.vocab_size} tokens")

    def build(self, attention: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
        return build(self.kind, self.config, attention, dtype, device, seed)

    def load(self, source: Source, device: torch.device, dtype: torch.dtype, attention: str = SERVED) -> Any:
        tensors = read_whole(source)
        placement = {} if device.type == "cpu" else {"device_map": {"": device}}
        try:
            with without_bars():
                model, report = self.kind.from_pretrained(
                    None,
                    config=self.config,
                    state_dict=tensors,
                    dtype=dtype,
                    attn_implementation=attention,
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
    return ", ".join(ordered[:MAX_LISTED]) + (f", and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else "")


logger = logging.getLogger(__name__)
RECOMPUTED_TOLERANCE = 0.02  # relative; a token that sees later ones changes far more than by rounding


class TokenPages(Attention):
    """A cache of token ids, as digits that every floating-point type represents exactly."""

    def __init__(self) -> None:
        super().__init__(AttentionSpec(1, 1, DIGITS, 1.0))

    def bind(self, kv: Tensor, group: int, backend: str = "auto", dtype: torch.dtype | None = None) -> None:  # noqa: ARG002
        self.kv, self.group, self.dtype = kv, group, dtype or kv.dtype

    def write(self, ids: Tensor, batch: Batch) -> None:
        powers = RADIX ** torch.arange(DIGITS, device=ids.device)
        digits = (ids[:, None] // powers % RADIX)[:, None].to(self.dtype)
        kv_write(self.bound(), digits, digits, batch.groups[self.group].write)

    def read(self, batch: Batch, row: int, length: int) -> Tensor:
        """Return the first `length` token ids of a row's sequence [length] int64."""
        kv, table = self.bound(), batch.groups[self.group].tables
        pages = table[row, : -(-length // kv.shape[3])].long()
        digits = kv[pages, 0, 0].flatten(0, 1)[:length].long()
        return (digits * RADIX ** torch.arange(DIGITS, device=digits.device)).sum(-1)


class Recomputed(Fallback):
    """A model of transformers without a cache of keys and values: correct, and slow."""

    def __init__(self, facts: "ModelFacts") -> None:
        nn.Module.__init__(self)
        self.config, self.kind = find_class(facts)
        self.facts = facts
        self.attentions, self.recurrents = [TokenPages()], []

    def fill(self, source: Source | None, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        logger.warning(
            "%s is recomputed: every token takes as long as its whole sequence, without a KV cache, because %s",
            self.facts.architecture, self.facts.recomputed,
        )  # fmt: skip
        model = self.build("eager", dtype, device, seed) if source is None else self.load(source, device, dtype, "eager")
        self.take(model)
        self.trunk.requires_grad_(False)
        self.head.requires_grad_(False)
        self._check(device)

    def forward(self, batch: Batch) -> Tensor:
        tokens = self.attentions[0]
        assert isinstance(tokens, TokenPages)
        tokens.write(batch.ids, batch)
        most = self.facts.vocab_size - 1
        parts = [
            self._run(tokens.read(batch, row, length).clamp_(max=most))[length - count :]
            for row, (_, count, length) in enumerate(batch.rows)
            if count
        ]
        return take_final(torch.cat(parts), batch)

    def _run(self, ids: Tensor) -> Tensor:
        """Return the hidden states [n, H] of ids [n]."""
        out: Tensor = self.trunk(input_ids=ids[None], use_cache=False)[0]
        return out[0]

    def _check(self, device: torch.device) -> None:
        """Raise ModelError if later tokens change the hidden states of earlier ones."""
        size = self.facts.vocab_size
        first, second = (torch.tensor(ids, device=device) % size for ids in ((3, 5, 7, 9, 11), (3, 5, 7, 10, 4)))
        try:
            with torch.inference_mode():
                one, other = (self._run(ids) for ids in (first, second))
                alone = self._run(first[:3])
                count = self.logits(one, PLAIN).shape[-1]
        except Exception as error:
            raise ModelError(
                f"{self.facts.architecture} cannot be run through transformers: a trial run fails ({error})"
            ) from error
        if one.shape != (5, one.shape[-1]) or count != size:
            raise ModelError(
                f"{self.facts.architecture} cannot be run through transformers: it returns {count} logits for {one.shape[0]} "
                f"states; expected {size} logits for 5 states"
            )
        if not one.isfinite().all():
            return  # random or broken weights: the check would compare NaN
        for others in (other[:3], alone):
            if (one[:3] - others).norm() > RECOMPUTED_TOLERANCE * one[:3].norm():
                raise ModelError(
                    f"{self.facts.architecture} cannot be run through transformers: later tokens change the hidden states of "
                    "earlier ones (it is not causal)"
                )
