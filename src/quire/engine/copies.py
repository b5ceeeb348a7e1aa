"""What an engine has to have beside copies of quantized matrices (`config/copies.py`). Importing this imports no torch."""

from quire.cache.capacity import MOST_SNAPSHOTS, pages_for
from quire.config.config import Config
from quire.config.facts import DTYPE_BYTES
from quire.config.memory import activation_bytes
from quire.engine.layouts import model_share
from quire.types.cache import CacheLayout


def may_copy(config: Config) -> bool:
    """Not where several engines or ranks have one GPU: none of them sees what the others will take."""
    asked = config.args.dequantized_copies is not False
    return asked and config.device == "cuda" and config.dtype != "float32" and not config.share_gpus


def least_cache(config: Config, layout: CacheLayout) -> int:
    """Bytes of a rank's cache as it was asked for, or of one longest request and all recurrent states."""
    args = config.args
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    pages = args.num_gpu_blocks_override or pages_for(layout, config.max_model_len, config.max_batched_tokens)
    states = (config.states_each + MOST_SNAPSHOTS) * config.max_seqs + 1
    return int((pages + 1) * layout.bytes_per_page / model_share(config, layout)) + states * config.state_bytes


def largest_step(config: Config) -> int:
    """Bytes of its activations, estimated. Whoever draws behind drafts needs logits of each of them, too."""
    tokens, drafts = config.max_batched_tokens, 0 if config.speculation is None else config.speculation.num_speculative_tokens
    rows = min(tokens, config.max_seqs * (1 + drafts))
    return activation_bytes(config.facts.hf, element_bytes=DTYPE_BYTES[config.dtype], tokens=tokens, rows=rows)
