"""Which model types the installed transformers knows, read from its source text: importing it takes seconds."""

import functools
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from quire.types.errors import ModelError

_TABLES = ("auto_mappings.py", "configuration_auto.py")  # of transformers.models.auto, which list every model type


@functools.cache
def _tables() -> str | None:
    """Return the source of the tables. None: transformers is not installed, or keeps its tables elsewhere."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "models" / "auto"
    try:
        text = "".join(file.read_text(encoding="utf-8") for name in _TABLES if (file := folder / name).is_file())
    except OSError:
        return None
    return text if '"llama"' in text else None


def check_model_type(kind: object, needs_own_code: bool) -> None:
    """Raise ModelError for a model type that no table mentions.

    `needs_own_code`: the checkpoint names Python files of its own repository (`auto_map`).
    """
    tables = _tables()
    if tables is None or (isinstance(kind, str) and f'"{kind}"' in tables):
        return
    if needs_own_code:
        raise ModelError("it needs code from its own repository, which is never run")
    raise ModelError(f"transformers {version('transformers')} does not know the model_type {kind!r}")
