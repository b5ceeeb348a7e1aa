"""Fields vLLM knows that are not built: using one is an error with a reason, never silence."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quire.types.errors import NotSupported


class _Refusal(NamedTuple):
    used: Callable[[Any], bool]
    reason: str


def _given(value: Any) -> bool:
    return value is not None


_TEXT_ONLY = "this server takes text only"

_REFUSALS = {
    **{
        f"guided_{kind}": _Refusal(_given, f'its name is now structured_outputs: {{"{kind}": ...}}')
        for kind in ("json", "regex", "choice", "grammar")
    },
    "functions": _Refusal(_given, "its name is now tools"),
    "function_call": _Refusal(_given, "its name is now tool_choice"),
    "suffix": _Refusal(_given, "the model cannot fill in the middle"),
    "prompt_embeds": _Refusal(_given, "prompts are text or token ids"),
    "media_io_kwargs": _Refusal(bool, _TEXT_ONLY),
    "mm_processor_kwargs": _Refusal(bool, _TEXT_ONLY),
    "routed_experts_prompt_start": _Refusal(bool, "routed experts are not returned"),
    "return_token_offsets": _Refusal(bool, "token offsets are not returned"),
    "return_assistant_tokens_mask": _Refusal(bool, "token masks are not returned"),
    "kv_transfer_params": _Refusal(bool, "this engine transfers no cache to others"),
    "ec_transfer_params": _Refusal(bool, "this engine transfers no cache to others"),
    "vllm_xargs": _Refusal(bool, "no installed plugin reads them"),
}  # fmt: skip


def refuse_what_is_not_built(request: Any) -> None:
    given = request.model_fields_set  # what was left out is not used
    for name, refusal in _REFUSALS.items():
        if name in given and refusal.used(getattr(request, name)):
            raise NotSupported(f"{name} cannot be used: {refusal.reason}", name)
