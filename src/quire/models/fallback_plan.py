"""What the cache of a model of transformers must hold, asked of the model itself: it is traced before its cache is planned."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quire.models.fallback_checks import trace
from quire.models.fallback_interface import WATCHED, Recomputable, build, find_class
from quire.types.cache import LayerCache

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

DIGITS, RADIX = 4, 128  # of token ids, where they are all that the cache holds


def plan(facts: "ModelFacts") -> "ModelFacts":
    """`facts` with the layers that the model attends with; or with one of tokens, where that cannot be (`recomputed`)."""
    config, kind = find_class(facts)
    bare = replace(facts, unplanned="", kinds=(), states=())
    try:
        model = build(kind, config, WATCHED, torch.bfloat16, torch.device("meta"), seed=0)
        calls, _ = trace(model)
    except Recomputable as error:
        return replace(bare, layers=(LayerCache(1, DIGITS),), recomputed=str(error))
    return replace(bare, layers=tuple(call.cache for call in calls))
