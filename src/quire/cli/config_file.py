"""`--config FILE`: flags in YAML, by their long names without dashes. What the command line says wins.

model: smollm2
port: 8080
enable-prefix-caching: false
served-model-name: [small, default]
override-generation-config: {temperature: 0.5}
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.types.errors import ConfigError

FLAG = "--config"


def take_config(args: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without the file, and the file. Only the last one is read."""
    rest: list[str] = []
    file, texts = None, iter(args)
    for text in texts:
        if text == "--":
            return [*rest, text, *texts], file
        if text == FLAG:
            file = next(texts, "")
        elif text.startswith(f"{FLAG}="):
            file = text.partition("=")[2]
        else:
            rest.append(text)
    return rest, file


def read_config(name: str) -> dict[str, Any]:
    import yaml  # comes with huggingface_hub

    path = Path(name).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"--config takes a YAML file, whose name ends with .yaml or .yml; got {name!r}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {name} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {name} must map the names of flags to their values")
    return content


def flags_of(content: Mapping[str, Any], actions: Mapping[str, argparse.Action]) -> list[str]:
    """As they would stand on the command line. `_` is `-`."""
    out: list[str] = []
    for key, value in content.items():
        flag = f"--{key.strip().lstrip('-').replace('_', '-')}"
        if flag == FLAG:
            raise ConfigError("a file of flags cannot name another one")
        switch = isinstance(actions.get(flag), argparse.BooleanOptionalAction) or getattr(actions.get(flag), "nargs", 1) == 0
        match value:
            case None:
                continue
            case True if switch:
                out.append(flag)
            case False if switch:
                out += [f"--no-{flag[2:]}"] if f"--no-{flag[2:]}" in actions else []
            case dict():
                out.append(f"{flag}={json.dumps(value)}")
            case list():
                out += [flag, *map(_text, value)] if value else []
            case _:
                out.append(f"{flag}={_text(value)}")
    return out


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
