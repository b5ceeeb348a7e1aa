"""What media processes read of a checkpoint: image processor, tokenizer and settings, once per process."""

import contextlib
import os
import sys
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from quire.features.media.families.base import MediaFamily
from quire.features.media.workers import wire


class MediaCheckpoint:
    """source: the name of a file with a `wire.MediaSource`"""

    def __init__(self, source: str) -> None:
        self._source_file = source

    def load(self) -> None:
        """Read everything that an image needs."""
        _ = self.processor, self.tokenizer, self.family

    @cached_property
    def _source(self) -> wire.MediaSource:
        return msgspec.json.decode(Path(self._source_file).read_bytes(), type=wire.MediaSource)

    @cached_property
    def family(self) -> MediaFamily:
        from quire.features.media.families import media_family

        family = media_family(self._source.architecture, self._source.config)
        assert family is not None
        return family

    @cached_property
    def processor(self) -> Any:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type] # transformers would import it, for seconds
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        # not from `transformers` itself: some releases demand torch and torchvision for the name there
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(
            self._source.path, backend="pil", local_files_only=True, trust_remote_code=False
        )
        import numpy as np
        from PIL import Image

        # what is imported with the first picture is not its cost
        with contextlib.suppress(Exception):
            processor(images=[Image.fromarray(np.zeros((64, 64, 3), np.uint8))], return_tensors="np")
        return processor

    @cached_property
    def tokenizer(self) -> Any:
        from quire.text.tokenizer_files import read_named

        where = self._source.tokenizer
        return read_named(Path(where.path), where.tokenizer, where.revision)

    @cached_property
    def video_settings(self) -> dict[str, Any]:
        return video_settings(Path(self._source.path))


@cache
def open_checkpoint(source: str) -> MediaCheckpoint:
    """Return the checkpoint; a process that was forked may have read it."""
    return MediaCheckpoint(source)


def video_settings(path: Path) -> dict[str, Any]:
    """Return the checkpoint's own settings of videos."""
    found: dict[str, Any] = {}
    for name, key in (("video_preprocessor_config.json", None), ("processor_config.json", "video_processor")):
        with contextlib.suppress(OSError, ValueError):
            read = msgspec.json.decode((path / name).read_bytes())
            part = read if key is None else read.get(key)
            found |= part if isinstance(part, dict) else {}
    return found
