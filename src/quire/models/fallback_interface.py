"""Where a transformers model hands its queries, keys and values to us.

transformers looks attention functions up by name. Ours only asks the calling module whom it belongs to, so that one process
can hold many models, each traced or run in its own way.

    WATCHED   a mask is described in words (`Mask`) instead of being made, and reaches the attention function as such
    SERVED    no mask is made at all
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.types.errors import ModelError

transformers: Any = importlib.import_module("transformers")

WATCHED, SERVED = "quire-watched", "quire"


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """transformers shows no progress: we do."""
    log = transformers.utils.logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


class Handler(Protocol):
    """Takes the place of attention in the modules it was installed on."""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:
        """query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim]."""
        ...


@dataclass(frozen=True)
class Mask:
    """What a model would have masked. `window`: positions a query sees, itself included; None = all before it."""

    window: int | None
    causal: bool = True  # False = something else than a plain causal mask with or without a window

    def __getattr__(self, name: str) -> Any:
        raise ModelError("it computes with its attention mask instead of handing it on")

    def __getitem__(self, index: Any) -> Any:
        raise ModelError("it cuts its attention mask instead of handing it on")

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ModelError("it computes with its attention mask instead of handing it on")


def install(handler: Handler, module: nn.Module) -> None:
    """From now on `module`'s attention is `handler`'s. It is no child of the module, even if it is one itself."""
    object.__setattr__(module, "quire_attention", handler)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    handler: Handler = module.quire_attention  # type: ignore[assignment]
    return handler(module, query, key, value, {**options, "attention_mask": attention_mask}), None


def _describe_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Mask:
    """Asks the mask's rule about telling pairs of positions. A rule that cannot be asked so is not a plain one."""
    edge = local_size or 16
    points = sorted({0, 1, 2, 3, *(edge * times + step for times in (1, 2, 3) for step in (-1, 0, 1))})
    at = torch.tensor(points, device="cpu")
    query, key, zero = at.unsqueeze(1), at.unsqueeze(0), torch.tensor(0, device="cpu")
    expected = key <= query
    if local_size is not None:
        expected &= key > query - local_size
    try:
        got = torch.as_tensor(mask_function(zero, zero, query, key), device="cpu").expand_as(expected)
    except Exception:
        return Mask(local_size, causal=False)
    return Mask(local_size, causal=torch.equal(got, expected))


for _name in (WATCHED, SERVED):
    transformers.AttentionInterface.register(_name, _attend)
transformers.AttentionMaskInterface.register(WATCHED, _describe_mask)
