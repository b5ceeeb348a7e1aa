"""Adapters for tests that have no model: all that the fake executor reads of one."""

import json
from pathlib import Path


def write_adapter(directory: Path, content: str, rank: int = 4) -> Path:
    """Another content is another version. Who reads meanwhile finds each file whole, the old one or the new one."""
    directory.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"__metadata__": {"content": content}}).encode()
    files = {
        "adapter_config.json": json.dumps({"r": rank, "peft_type": "LORA"}).encode(),
        "adapter_model.safetensors": len(header).to_bytes(8, "little") + header,
    }
    for name, written in files.items():
        beside = directory.parent / f"{directory.name}.{name}"
        beside.write_bytes(written)
        beside.replace(directory / name)
    return directory
