"""The encoder of a model that reads images and videos, and its cache of embeddings by digest.

    MediaArray (bytes, or a file in shared memory) ─► device ─► Tower.encode ─► embeddings [n, levels * hidden size]

Embeddings that a request brings are kept as they are.

What the cache holds is decided by the scheduler (`StepPlan.encode`, `StepPlan.forget`). An item that cannot be encoded has an
error in place of embeddings: its request fails, and others go on.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.features.media.embeds import EMBEDS
from quire.features.media.host import ModelMedia
from quire.features.media.towers.base import Tower
from quire.load.load import load_weights
from quire.types.errors import EngineError
from quire.types.media import MediaArray, MediaItem, Modality

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts
    from quire.config.quantization import Quantization

logger = logging.getLogger(__name__)
Encoded = Tensor | str  # embeddings, or why there are none


def load_tower(
    media: ModelMedia,
    facts: "ModelFacts",
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str,
    seed: int,
    quantization: "Quantization | None",
) -> Tower:
    """Return the encoder with its weights. Quantized matrices are dequantized."""
    module, name = media.family.tower.split(":")
    with torch.device("meta"):
        tower: Tower = getattr(import_module(f"quire.features.media.towers.{module}"), name)(media.config)
    if quantization is not None and quantization.online:
        quantization = None
    load_weights(
        tower, facts, device=device, dtype=dtype, load_format=load_format, seed=seed, quantization=quantization
    )  # fmt: skip
    return tower.eval()


class Encoder:
    def __init__(self, tower: Tower, device: torch.device, dtype: torch.dtype, columns: int, one_by_one: bool) -> None:
        """columns: of an embedding: levels * hidden size. one_by_one: items are not encoded together."""
        self._tower, self._device, self._dtype, self._columns = tower, device, dtype, columns
        self._one_by_one = one_by_one
        self._cached: dict[str, Tensor] = {}

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._tower.parameters())

    def clear(self) -> None:
        self._cached.clear()

    def forget(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._cached.pop(digest, None)

    def keep(self, items: Sequence[MediaItem]) -> dict[str, str]:
        """Encode items and keep their embeddings. Return errors by digest."""
        found = self.encode(items)
        self._cached |= {digest: each for digest, each in found.items() if isinstance(each, Tensor)}
        return {digest: each for digest, each in found.items() if isinstance(each, str)}

    def encode(self, items: Sequence[MediaItem]) -> dict[str, Encoded]:
        """Return the embeddings of items by digest; those of one modality that are not cached are encoded together.

        Of items with one digest, any whose arrays can be read is encoded.
        """
        found: dict[str, Encoded] = {item.digest: self._cached[item.digest] for item in items if item.digest in self._cached}
        wanted = defaultdict[Modality, dict[str, list[MediaItem]]](dict)
        for item in items:
            if item.digest not in found:
                wanted[item.modality].setdefault(item.digest, []).append(item)
        for modality, some in wanted.items():
            arrays, errors = self._read(some)
            embeds = {digest: arrays.pop(digest)[EMBEDS] for digest in list(arrays) if EMBEDS in arrays[digest]}
            found |= errors | {digest: self._check(some[digest][0], each) for digest, each in embeds.items()}
            found |= self._encode(modality, {digest: some[digest][0] for digest in arrays}, arrays)
        return found

    def _read(self, items: Mapping[str, Sequence[MediaItem]]) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
        """Return the arrays of items on the device, and errors of those that cannot be read."""
        arrays, errors = dict[str, dict[str, Tensor]](), dict[str, str]()
        for digest, item in ((digest, item) for digest, same in items.items() for item in same):
            if digest in arrays:
                continue
            try:
                arrays[digest] = {array.name: self._upload(read_array(array)) for array in item.arrays}
                errors.pop(digest, None)
            except (OSError, ValueError) as error:
                logger.warning("encoder input of the modality %s cannot be read: %s", item.modality, error)
                errors[digest] = f"the {item.modality} cannot be read: its preprocessed values are gone"
        return arrays, errors

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Return an array on the device, floats in the dtype of the weights. Integers stay on the host."""
        tensor = torch.from_numpy(array)
        if tensor.dtype == torch.int64:
            return tensor
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def _encode(
        self, modality: Modality, items: Mapping[str, MediaItem], arrays: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Encoded]:
        """Encode items of one modality together; one by one if that fails or is asked for."""
        if len(items) > 1 and self._one_by_one:
            return self._encode_each(modality, items, arrays)
        if not items:
            return {}
        try:
            found = self._tower.encode(modality, [arrays[digest] for digest in items])
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if len(items) > 1:
                return self._encode_each(modality, items, arrays)
            logger.warning("encoding failed for one input of the modality %s", modality, exc_info=error)
            return dict.fromkeys(items, f"the {modality} cannot be encoded: {_summary(error)}")
        return {digest: self._check(item, each) for (digest, item), each in zip(items.items(), found, strict=True)}

    def _encode_each(
        self, modality: Modality, items: Mapping[str, MediaItem], arrays: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Encoded]:
        found = dict[str, Encoded]()
        for digest, item in items.items():
            found |= self._encode(modality, {digest: item}, arrays)
        return found

    def _check(self, item: MediaItem, embeddings: Tensor) -> Encoded:
        if embeddings.shape == (item.embeddings, self._columns):
            return embeddings.to(self._dtype)
        rows, columns = embeddings.shape
        return (
            f"the {item.modality} has {rows} embeddings of {columns} values; its prompt has {item.embeddings} tokens for "
            f"embeddings of {self._columns}"
        )


def read_array(array: MediaArray) -> npt.NDArray[np.generic]:
    """Return a preprocessed array. One in a file is mapped, not read."""
    if array.path:
        return np.require(np.memmap(array.path, array.dtype, "c", array.offset, array.shape), requirements="A")
    count = math.prod(array.shape)
    return np.frombuffer(bytearray(array.data), array.dtype, count).reshape(array.shape)


def _summary(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "the device is out of memory"
    if isinstance(error, EngineError):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"[:300]
