"""What every rank must have resolved as rank 0 did, compared before weights are loaded. Importing this does not import torch.

Nodes compare version, model files and arguments when they connect (`handshake.py`). Arguments that are left out are resolved on
each machine, from its files, packages, device and environment: if ranks resolved them differently, they would divide the model
differently, or run different collectives.
"""

import importlib.metadata
import json
import os
from collections.abc import Mapping
from hashlib import sha256

from quire.config.config import Config
from quire.config.devices import SHARE
from quire.engine.handshake import different_file
from quire.files.identity import identity
from quire.files.reading import shown
from quire.types.errors import ConfigError, ModelError

GPU = "GPU"
REMEDY = "Install the same packages on all nodes, and start all with the same arguments and environment variables"
REMEDIES = {GPU: "Give all ranks GPUs of one model (CUDA_VISIBLE_DEVICES), or use pipeline_parallel_size"}  # by name


def resolved_values(config: Config) -> dict[str, str]:
    """Return the values that all ranks must agree on, by the name that an error shows."""
    facts = config.facts
    values = {
        "torch": importlib.metadata.version("torch"),
        "device": config.device,
        "architecture": facts.architecture,
        "model configuration": sha256(json.dumps(facts.hf, sort_keys=True, default=repr).encode()).hexdigest()[:16],
        "dtype": config.dtype,
        "KV cache dtype": config.cache_dtype,
        "quantization": "none" if config.quantization is None else config.quantization.method,
        "quantized layouts in memory": ", ".join(sorted(config.native_layouts)) or "none",
        "block_size": config.page_size,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.max_batched_tokens,
        "max_num_seqs": config.max_seqs,
        "layers of each stage": ", ".join(str(len(stage)) for stage in config.stage_layers),
        "speculation": config.draft_method or "none",
        "features": ", ".join(sorted(config.features)) or "none",
    }
    if config.device == "cuda" and config.stages == 1:  # ranks of a stage sample alike, and divide their work evenly
        values[GPU] = config.device_facts.name
    if config.device == "cuda":
        values[SHARE] = os.environ.get(SHARE, "0")  # decides how ranks of several nodes communicate
    return {name: str(value) for name, value in values.items()}


def refuse_other_values(config: Config, expected: Mapping[str, str]) -> None:
    """Raise ConfigError if this rank resolved a value differently from rank 0. expected: rank 0's."""
    own = resolved_values(config)
    for name in expected:
        if own.get(name) != expected[name]:
            raise ConfigError(
                f"its {name} is {shown(own.get(name))}, rank 0's is {shown(expected[name])}. {REMEDIES.get(name, REMEDY)}"
            )


def draft_files(config: Config) -> dict[str, str]:
    """Return digests of the draft model's files; empty without a draft model or head in files of its own."""
    facts = config.draft_facts if config.draft_head is None else config.draft_head.facts
    return {} if facts is None else identity(facts.files)


def refuse_other_draft(config: Config, expected: Mapping[str, str]) -> None:
    """Raise ModelError if this machine's draft model differs from machine 0's: ranks must verify the same draft tokens."""
    if expected and (found := different_file(expected, draft_files(config))):
        assert config.speculation is not None
        raise ModelError(f"the draft model {config.speculation.model} is not machine 0's: {found}")
