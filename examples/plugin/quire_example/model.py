"""The mathematics of the family: what differs from Llama."""

from quire.config.facts import ModelFacts
from quire.layers.norm import Norm, RMSNorm
from quire.models.llama import Llama


class Example(Llama):
    def make_norm(self, facts: ModelFacts, size: int | None = None) -> Norm:
        return RMSNorm(size or facts.hidden_size, facts.hf["rms_norm_eps"], offset=1.0)
