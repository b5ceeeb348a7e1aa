"""Adapters for tests that have no model: all that the fake executor reads of one."""

import json
from pathlib import Path


def write_adapter(directory: Path, content: str, rank: int = 4) -> Path:
    """Another content is another version."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    header = json.dumps({"__metadata__": {"content": content}}).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory
