"""Adapters for tests that have no model: all that the fake executor reads of one."""

import json
from pathlib import Path


def write_adapter(directory: Path, content: str, rank: int = 4) -> Path:
    """Another content is another version."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    (directory / "adapter_model.safetensors").write_bytes(content.encode())
    return directory
