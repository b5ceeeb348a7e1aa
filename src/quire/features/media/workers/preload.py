"""What the fork server of the media processes imports: the packages that decode and preprocess, image processor and tokenizer.

When the server ends, its API process has ended; files in shared memory that it could not remove are removed here.
"""

import atexit
import contextlib
import logging
import os
from importlib import import_module
from pathlib import Path

SOURCE_VARIABLE = "QUIRE_MEDIA_SOURCE"  # a file with a `wire.MediaSource`
MODULES = ("quire.features.media.workers.worker", "quire.features.media.workers.images", "PIL.ImageOps", "av", "numpy")

logger = logging.getLogger(__name__)


def preload(source: str) -> None:
    from quire.features.media.store import sweep
    from quire.features.media.workers.checkpoint import open_checkpoint

    atexit.register(sweep, Path(source).parents[1])
    for module in MODULES:
        with contextlib.suppress(ImportError):  # a request that needs it fails with an error that names it
            import_module(module)
    try:
        open_checkpoint(source).load()
    except Exception as error:
        logger.warning("images and videos cannot be read: %s: %s", type(error).__name__, error)


if SOURCE_VARIABLE in os.environ:
    preload(os.environ[SOURCE_VARIABLE])
