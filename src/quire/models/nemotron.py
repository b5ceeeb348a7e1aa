"""Nemotron: layer norms whose weight is an offset from one, a feed-forward of squared relu, heads that turn in part."""

from typing import TYPE_CHECKING

from torch import nn

from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, Norm
from quire.models.llama import Llama

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Nemotron(Llama):
    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf = facts.hf
        return MLP(facts.hidden_size, hf["intermediate_size"], hf.get("hidden_act", "relu2"), bias=bool(hf.get("mlp_bias")))

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        return LayerNorm(size or facts.hidden_size, facts.hf.get("norm_eps", 1e-5), offset=1.0)
