"""Gemma 3n: several residual streams of which a layer reads one and corrects all (AltUp), a low-rank path past attention
(LAuReL), and an extra input for every layer. The last layers attend to the keys and values of other layers.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch, Tokens
from quire.layers.attention import SelfAttention, SharedAttention, take_final
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, SparseGatedMLP
from quire.layers.norm import Norm
from quire.layers.parameter import parameter
from quire.models.gemma import Gemma2
from quire.models.gemma4 import GATE_RENAMES, INPUT_RENAMES, Gate, LayerInputs, SharingGemma

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class AltUp(nn.Module):
    """Alternating updates: streams [T, S, H], of which a layer reads the `active` one."""

    def __init__(self, hidden_size: int, streams: int, active: int, router_norm: Norm, scaled: bool) -> None:
        super().__init__()
        self.streams, self.active, self.scaled = streams, active, scaled
        self.router_norm = router_norm
        self.modality_router = Linear(hidden_size, streams)
        self.prediction_coefs = Linear(streams, streams * streams)
        self.correction_coefs = Linear(streams, streams)
        self.correct_output_scale = parameter(hidden_size)

    def routed(self, x: Tensor, tokens: Tokens) -> Tensor:
        return torch.tanh(self.modality_router(self.router_norm(x) * x.shape[-1] ** -1.0, tokens).float()).to(x.dtype)

    def predict(self, streams: Tensor, tokens: Tokens) -> Tensor:
        """Return a prediction of every stream from all of them."""
        routed = self.prediction_coefs(self.routed(streams[:, self.active], tokens), tokens)
        mixture: Tensor = routed.unflatten(1, (self.streams, self.streams))  # type: ignore[no-untyped-call]
        return streams + mixture @ streams

    def correct(self, predictions: Tensor, x: Tensor, tokens: Tokens) -> Tensor:
        """Return the streams corrected by x [T, H], the active stream after the layer."""
        shares: Tensor = self.correction_coefs(self.routed(x, tokens), tokens) + 1.0
        return predictions + shares[:, :, None] * (x - predictions[:, self.active])[:, None]

    def output(self, streams: Tensor) -> Tensor:
        x = streams[:, self.active]
        return x * self.correct_output_scale if self.scaled else x


class Laurel(nn.Module):
    """Low-rank residual path past attention."""

    def __init__(self, hidden_size: int, rank: int, norm: Norm) -> None:
        super().__init__()
        self.linear_left, self.linear_right = Linear(hidden_size, rank), Linear(rank, hidden_size)
        self.post_laurel_norm = norm

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x, tokens), tokens))


class Gemma3nBlock(nn.Module):
    def __init__(
        self,
        norms: tuple[Norm, Norm, Norm, Norm],
        self_attn: SelfAttention,
        mlp: nn.Module,
        altup: AltUp,
        laurel: Laurel,
        gate: Gate,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms[:2]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2:]
        self.self_attn, self.mlp, self.altup, self.laurel, self.gate = self_attn, mlp, altup, laurel, gate

    def forward(self, streams: Tensor, given: Tensor, batch: Batch) -> Tensor:
        """Return streams [T, S, H]; given [T, P]: the layer's extra input. The last layer that writes keys and values returns
        the final tokens only.
        """
        tokens = (batch.final if isinstance(self.self_attn, SharedAttention) else batch).tokens
        predictions = self.altup.predict(streams, tokens)
        x = predictions[:, self.altup.active]
        normed = self.input_layernorm(x)
        skipped = x + self.laurel(normed, tokens)
        attended = self.post_attention_layernorm(self.self_attn(normed, batch))
        predictions, skipped, given = (self.self_attn.select_residual(part, batch) for part in (predictions, skipped, given))
        tokens = self.self_attn.tokens_after(batch)
        x = (attended + skipped) * 2**-0.5
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), tokens))
        streams = self.altup.correct(predictions, x, tokens)
        let_through = self.gate(self.altup.output(streams), given, tokens)
        streams[:, 1:] += let_through[:, None]
        return streams


class Gemma3n(SharingGemma):
    renames = (*Gemma2.renames, *INPUT_RENAMES, *GATE_RENAMES)

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        others, size = facts.hf.get("altup_num_inputs", 4) - 1, facts.hf["hidden_size_per_layer_input"]
        self.inputs = LayerInputs(facts, self.make_norm(facts, size), size, len(self.owners))
        self.altup_projections, self.altup_unembed_projections = (
            nn.ModuleList(Linear(facts.hidden_size, facts.hidden_size) for _ in range(others)) for _ in range(2)
        )

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        given = self.inputs(x, batch)
        streams = torch.stack([x, *(with_rms_of(project(x, batch.tokens), x) for project in self.altup_projections)], 1)
        for index, block in enumerate(self.layers):
            streams = block(streams, given[:, index], batch)
            if index == self.writers - 1:
                given = take_final(given, batch)
        first, *others = streams.unbind(1)
        tokens, ways = batch.final.tokens, zip(self.altup_unembed_projections, others, strict=True)
        return self.norm(torch.stack([first, *(with_rms_of(project(x, tokens), first) for project, x in ways)]).mean(0))

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        hf, size = facts.hf, facts.hidden_size
        first, second, third, fourth = (self.make_norm(facts) for _ in range(4))
        streams, active = hf.get("altup_num_inputs", 4), hf.get("altup_active_idx", 0)
        altup = AltUp(size, streams, active, self.make_norm(facts), bool(hf.get("altup_correct_scale", True)))
        laurel = Laurel(size, hf.get("laurel_rank", 64), self.make_norm(facts))
        gate = Gate(size, hf["hidden_size_per_layer_input"], self.activation(facts), self.make_norm(facts))
        attention, mlp = self.make_attention(facts, index), self.make_mlp(facts, index)
        return Gemma3nBlock((first, second, third, fourth), attention, mlp, altup, laurel, gate)

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:
        inner, sparsity, count = facts.hf["intermediate_size"], facts.hf.get("activation_sparsity_pattern"), len(self.owners)
        if sparsity is None:
            sparsity = [0.95 if count > 10 > layer else 0.0 for layer in range(count)]
        inner, share = (value[index] if isinstance(value, list) else value for value in (inner, sparsity))
        if share:
            return SparseGatedMLP(facts.hidden_size, inner, self.activation(facts), share)
        return GatedMLP(facts.hidden_size, inner, self.activation(facts))


def with_rms_of(x: Tensor, other: Tensor) -> Tensor:
    """Return x [T, H] scaled to the other's root mean square."""
    length = other.square().mean(-1, keepdim=True).sqrt()
    return x * length / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
