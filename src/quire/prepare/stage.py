"""Reduce a model to the layers of one pipeline stage. Modules before and after the layers belong to the first stage, the final
norm to the last.
"""

from torch import nn

from quire.dist.stages import Stage
from quire.layers.attention import Attention
from quire.layers.norm import NoNorm
from quire.layers.recurrent import Recurrence
from quire.types.errors import ConfigError

LAYERS, NORM = "layers", "norm"


class OtherStage(nn.Module):
    """A module of another stage."""


def take_stage(model: nn.Module, stage: Stage) -> None:
    """Keep the stage's layers only, before loading. Layers keep their names; weights of other stages are not read.

    A stage that is not the last returns the sum of its last layer's output and the residual stream, for all tokens.
    """
    layers, norm = getattr(model, LAYERS, None), getattr(model, NORM, None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise ConfigError("pipeline parallelism requires a model family of Quire's own")
    own = nn.ModuleList()
    for index in stage.own:
        own.add_module(str(index), layers[index])
    setattr(model, LAYERS, own)
    renames: list[tuple[str, str | None]] = [(rf"^{LAYERS}\.(?!({'|'.join(map(str, stage.own))})\.)", None)]
    if not stage.last:
        setattr(model, NORM, NoNorm())
        renames.append((rf"^{NORM}\.", None))
    if not stage.first:
        for name, _ in list(model.named_children()):
            if name not in (LAYERS, NORM):
                setattr(model, name, OtherStage())
        renames.append((rf"^(?!({LAYERS}|{NORM})\.)", None))
    model.renames = (*getattr(model, "renames", ()), *renames)  # type: ignore[assignment]
    model.attentions = [layer for layer in model.modules() if isinstance(layer, Attention)]  # type: ignore[assignment]
    model.recurrents = [layer for layer in model.modules() if isinstance(layer, Recurrence)]  # type: ignore[assignment]
