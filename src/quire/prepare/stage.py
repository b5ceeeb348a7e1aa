"""A stage's part of a model: some of its layers. What is before and behind all layers is the first stage's, but the last norm
is the last's."""

from torch import nn

from quire.dist.stages import Stage
from quire.layers.attention import Attention
from quire.layers.norm import NoNorm
from quire.types.errors import ConfigError

LAYERS, NORM = "layers", "norm"


class Elsewhere(nn.Module):
    """What another stage has."""


def keep_stage(model: nn.Module, stage: Stage) -> None:
    """Before anything is loaded. Layers keep their names, and what the checkpoint has of others is not read. Of a stage that is
    not the last, the sum of what its last layer gives and the residual stream comes out, of all tokens."""
    layers, norm = getattr(model, LAYERS, None), getattr(model, NORM, None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise ConfigError("only models of a family of our own can be divided into stages")
    kept = nn.ModuleList()
    for index in stage.own:
        kept.add_module(str(index), layers[index])
    setattr(model, LAYERS, kept)
    renames: list[tuple[str, str | None]] = [(rf"^{LAYERS}\.(?!({'|'.join(map(str, stage.own))})\.)", None)]
    if not stage.last:
        setattr(model, NORM, NoNorm())
        renames.append((rf"^{NORM}\.", None))
    if not stage.first:
        for name, _ in list(model.named_children()):
            if name not in (LAYERS, NORM):
                setattr(model, name, Elsewhere())
        renames.append((rf"^(?!({LAYERS}|{NORM})\.)", None))
    model.renames = (*getattr(model, "renames", ()), *renames)  # type: ignore[assignment]
    model.attentions = [layer for layer in model.modules() if isinstance(layer, Attention)]  # type: ignore[assignment]
