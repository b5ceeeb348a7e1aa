"""`system_fingerprint`: it differs between two servers whenever the same request might get other tokens."""

import functools
import hashlib
import platform
from collections.abc import Mapping

from quire import __version__
from quire.config.config import Config
from quire.files.identity import identity
from quire.files.resolve import ModelFiles
from quire.types.errors import ModelError

_ARGUMENTS = ("model", "revision", "tokenizer", "tokenizer_revision", "hf_overrides", "model_impl", "load_format", "seed",
              "chat_template", "quantization", "dequantized_copies", "enable_expert_parallel", "logprobs_mode")  # fmt: skip


@functools.cache
def files_digest(files: ModelFiles) -> Mapping[str, str]:
    """Return the digests of weights, configuration and tokenizer. Large files are sampled: a 70B checkpoint takes milliseconds.

    The server calls it while the engine loads, so that the first request does not read files.
    """
    try:
        return identity(files)
    except ModelError:  # the files are gone, and the engine still has what it read
        return {}


def system_fingerprint(config: Config) -> str:
    parts = {
        "files": files_digest(config.facts.files),
        "arguments": [repr(getattr(config.args, name)) for name in _ARGUMENTS],
        "machine": (platform.machine(), config.device, config.device_facts.name),
        "types": (config.dtype, config.cache_dtype, config.keep_quantized),
        "ranks": (config.ranks, config.stages),
    }
    return f"quire-{__version__}-{hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:8]}"
