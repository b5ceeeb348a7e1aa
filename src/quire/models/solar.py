"""Solar Pro: Llama some of whose layers are given a mixture with what others were given before."""

from typing import TYPE_CHECKING

from torch import Tensor

from quire.attn.batch import Batch
from quire.files.reading import shown
from quire.models.llama import Llama
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts


class Solar(Llama):
    """What goes into the layers of `bskcn_1` and `bskcn_2` is kept; into those of `bskcn_3` and `bskcn_4` goes a mixture with
    what was kept last of the one and the other, whose share is the second of `bskcn_tv` (the first is for training)."""

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        places = [facts.hf[f"bskcn_{number}"] for number in (1, 2, 3, 4)]
        for number, layers in enumerate(places, 1):
            if not isinstance(layers, list) or not all(layer in range(len(facts.layers)) for layer in layers):
                raise ModelError(f"bskcn_{number} must be a list of layers, got {shown(layers)}")
        for kept, mixed in ((0, 2), (1, 3)):
            if places[mixed] and (not places[kept] or min(places[kept]) > min(places[mixed])):
                raise ModelError(f"bskcn_{mixed + 1} has a layer before the first of bskcn_{kept + 1}, whose input it needs")
        self.skips = tuple((frozenset(places[kept]), frozenset(places[mixed])) for kept, mixed in ((0, 2), (1, 3)))
        self.share = float(facts.hf["bskcn_tv"][1])

    def run_blocks(self, x: Tensor, batch: Batch) -> Tensor:
        residual: Tensor | None = None
        kept: list[Tensor] = [x, x]
        for index, block in enumerate(self.layers):
            for number, (keeping, _) in enumerate(self.skips):
                if index in keeping:
                    kept[number] = x if residual is None else x + residual
            for number, (_, mixing) in enumerate(self.skips):
                if index in mixing:
                    now = x if residual is None else x + residual
                    x, residual = kept[number] * self.share + now * (1.0 - self.share), None
            x, residual = block(x, residual, batch)
        return self.norm.add(x, residual)[0]
