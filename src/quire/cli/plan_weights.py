"""What weights take in memory, from the headers of their files, or from the shapes where there are none."""

from quire.config.config import Config
from quire.config.facts import DTYPE_BYTES, ModelFacts
from quire.config.memory import form_weight_bytes, kept_weight_bytes
from quire.config.quantization import FORMS, Quantization, quantized_bytes
from quire.engine.expected import expected_bytes
from quire.files.gguf import read_gguf_shards
from quire.files.safetensors import read_header
from quire.models.registry import find_family


def weights_of(facts: ModelFacts, quantization: Quantization | None, keeps: frozenset[str], dtype: str) -> tuple[int, str]:
    """Their bytes, and as what they are there. `keeps`: the forms that stay as they are (`DeviceFacts.keeps`)."""
    element = DTYPE_BYTES[dtype]
    floats = facts.parameters * element
    if quantization is not None and find_family(facts) and keeps.intersection(FORMS[quantization.method]):
        infos = {name: info for path in facts.files.weights for name, info in read_header(path).items()}
        if quantization.online or not infos:
            total = expected_bytes(facts, quantization, keeps, dtype)
        else:
            total = quantized_bytes(infos, quantization, keeps, element)
        return (total, f"{quantization.method}, the rest {dtype}") if total < floats else (floats, dtype)
    if keeps and facts.files.format == "gguf" and facts.files.weights:
        headers = read_gguf_shards(facts.files.weights)
        tensors = [tensor for header in headers for tensor in header.tensors.values()]
        if "blocks" in keeps:
            return kept_weight_bytes(tensors), "the file's blocks, repacked"
        return form_weight_bytes(tensors, element, "experts" in keeps), f"4, 6 and 8 bits, the rest {dtype}"
    return floats, dtype


def largest_part(config: Config, weights: int) -> int:
    """Of all weights, those of a rank in the stage with most layers."""
    layers = [len(stage) for stage in config.stage_layers] if config.stages > 1 else [1]
    return weights * max(layers) // (sum(layers) * config.ranks)
