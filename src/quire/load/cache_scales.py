"""Scales of an 8-bit KV cache that a checkpoint has, per layer or per head, for keys and values."""

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from quire.layers.attention import SelfAttention
from quire.load.assign import Renames, rename
from quire.load.source import Source, TensorSlice
from quire.types.errors import ModelError

# all names that concern a cache, or queries, which are not quantized
KV_SCALES: Renames = (
    (r"\.(q|k|v|kv)_scale$", None),
    (r"\.(q|k|v)_proj\.output_scale$", None),
    (r"\.(k|v)_cache\.scale$", None),
    (r"\.(q|k|v|kv)_zero_point$", None),
)
_SPELLINGS = [
    re.compile(pattern)
    for pattern in (
        r"^(?P<path>.*?)(\.(\w+_proj|qkv))?\.(?P<which>k|v|kv)_scale$",
        r"^(?P<path>.*)\.(?P<which>k|v)_proj\.output_scale$",
        r"^(?P<path>.*)\.(?P<which>k|v)_cache\.scale$",
    )
]
_ZERO_POINT = re.compile(r"\.(k|v|kv)_zero_point$")


def has_cache_scales(source: Source, renames: Renames) -> bool:
    names = [ours for name in source.shapes if (ours := rename(name, renames)) is not None]
    return any(spelling.match(name) for name in names for spelling in _SPELLINGS)


def take_cache_scales(model: nn.Module, source: Source, renames: Renames, device: torch.device) -> int:
    """Give every attention layer its scales; return how many layers have some."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in source.shapes:
        ours = rename(name, renames)
        if ours is None:
            continue
        if _ZERO_POINT.search(ours):
            raise ModelError(f"{name}: zero points are not supported for an 8-bit KV cache; use kv_cache_dtype='auto'")
        for spelling in _SPELLINGS:
            if (match := spelling.match(ours)) is not None:
                for which in match["which"]:
                    found[match["path"]][which] = name
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, SelfAttention)}
    for path, names in found.items():
        if path not in layers:
            raise ModelError(f"{min(names.values())} is a KV cache scale, but {path!r} is not an attention layer")
        if missing := {"k", "v"} - names.keys():
            [other] = names.values()
            raise ModelError(f"{other} requires {missing.pop()}_scale of {path} as well; use kv_cache_dtype='auto'")
        both = [_read(source, names[which], layers[path]) for which in "kv"]
        layers[path].cache_scales = torch.stack(both).to(device)
    return len(found)


def _read(source: Source, name: str, layer: SelfAttention) -> Tensor:
    [(_, tensor)] = source.read([TensorSlice(name)])
    values, total = tensor.float().flatten(), layer.division.keys
    if len(values) not in (1, total):
        raise ModelError(f"{name} must have 1 value or one per head ({total}); got {len(values)}")
    if not bool(((values > 0) & values.isfinite()).all()):
        raise ModelError(f"{name} has a scale that is not a positive finite number; the checkpoint is damaged")
    return values.expand(total)[layer.local_keys.start : layer.local_keys.stop].clone()
