"""Copies of quantized matrices (`ops/copies.py`), by the rule of the engine (`config/copies.py`), from the headers of files."""

from typing import NamedTuple

from quire.cli.plan_weights import largest_part
from quire.config.config import Config
from quire.config.copies import NOTHING, Copies, copied_gguf_numbers, copied_numbers, estimate_copied
from quire.config.facts import DTYPE_BYTES
from quire.config.memory import parameter_parts
from quire.engine.copies import least_cache, may_copy
from quire.files.gguf import read_gguf_shards
from quire.files.safetensors import read_header
from quire.models.registry import find_family
from quire.types.cache import CacheLayout


class PlannedCopies(NamedTuple):
    """Of one device."""

    made: int = 0  # bytes
    refused: str = ""  # why there are none, where there could be
    note: str = ""  # why there can be none, and somebody asked


def plan_copies(config: Config, layout: CacheLayout, usable: int, held: int) -> PlannedCopies:
    """held: bytes of everything but the cache."""
    numbers = _count(config) if may_copy(config) else 0
    if not numbers:
        return PlannedCopies(note=NOTHING if config.args.dequantized_copies else "")
    wanted = largest_part(config, numbers) * DTYPE_BYTES[config.dtype]
    copies = Copies(wanted, usable, held, least_cache(config, layout), bool(config.args.dequantized_copies))
    return PlannedCopies(made=copies.wanted) if copies.fit else PlannedCopies(refused=copies.reason)


def _count(config: Config) -> int:
    """Numbers of all ranks."""
    facts, quantization, keeps = config.facts, config.quantization, config.kept_forms
    if not find_family(facts) or not keeps:
        return 0
    if facts.files.format == "gguf":
        headers = read_gguf_shards(facts.files.weights) if facts.files.weights else []
        return copied_gguf_numbers(tensor for header in headers for tensor in header.tensors.values())
    if quantization is None or quantization.online:
        return 0
    infos = {name: info for path in facts.files.weights for name, info in read_header(path).items()}
    if not infos:
        return estimate_copied(parameter_parts(facts.hf).dense, quantization, keeps)
    return copied_numbers(infos, quantization, keeps)
