"""Which model types the installed transformers knows, read from its source text: importing transformers takes seconds."""

import functools
import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.config.families import model_types
from quire.config.families.composites import COMPOSITES
from quire.types.errors import ModelError

_TYPE_TABLES = ("auto_mappings.py", "configuration_auto.py")  # of transformers.models.auto, which list every model type
# the later wins: a text model alone rather than a multimodal model
_CLASS_TABLES = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def _read(*names: str) -> str:
    """Return the source of files of transformers.models.auto; empty where there is no transformers or no such file."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parent / "models" / "auto"
    try:
        return "".join(file.read_text(encoding="utf-8") for name in names if (file := folder / name).is_file())
    except OSError:
        return ""


@functools.cache
def _type_tables() -> str:
    text = _read(*_TYPE_TABLES)
    return text if '"llama"' in text else ""


@functools.cache
def _classes() -> Mapping[str, str]:
    """Return the class that transformers has for each model_type."""
    source, found = _read("modeling_auto.py"), dict[str, str]()
    for table in _CLASS_TABLES:
        body = source.partition(f"{table} = OrderedDict(")[2].partition("\n)")[0]
        found |= dict(re.findall(r'\("([^"]+)", "([^"]+)"\)', body))
    return found


def class_of(kind: str) -> str | None:
    """Return the class that transformers, or else Quire, has for a model_type."""
    card = model_types().get(kind)
    composites = (name for name, composite in COMPOSITES.items() if composite.model_type == kind)
    return _classes().get(kind) or next(composites, None) or (None if card is None else card.architectures[0])


def with_architecture(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with `architectures`; unchanged if it has some, or its model_type is not known."""
    kind = config.get("model_type")
    if config.get("architectures") or not isinstance(kind, str) or (name := class_of(kind)) is None:
        return config
    return {**config, "architectures": [name]}


def check_model_type(kind: object, needs_own_code: bool) -> None:
    """Raise ModelError for a model type that transformers does not list.

    `needs_own_code`: the checkpoint names Python files of its own repository (`auto_map`).
    """
    tables = _type_tables()
    if not tables or (isinstance(kind, str) and f'"{kind}"' in tables):
        return
    if needs_own_code:
        raise ModelError("it needs code from its own repository, which is never run")
    raise ModelError(f"transformers {version('transformers')} does not know the model_type {kind!r}")
