"""Heads with layers, by method."""

from collections.abc import Callable, Mapping

from quire.config.draft_heads import DraftHead
from quire.config.speculative import EAGLE, EAGLE3, MTP
from quire.runner.draft.eagle import EagleLayers
from quire.runner.draft.eagle3 import Eagle3Layers
from quire.runner.draft.head import HeadDrafter, HeadLayers
from quire.runner.draft.mtp import MTPLayers

__all__ = ["LAYERS", "HeadDrafter"]

LAYERS: Mapping[str, Callable[[DraftHead], HeadLayers]] = {EAGLE: EagleLayers, EAGLE3: Eagle3Layers, MTP: MTPLayers}
