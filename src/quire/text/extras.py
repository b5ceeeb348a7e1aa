"""What vLLM's calls take beside a prompt and its parameters, for LLM and LLMEngine alike: read here, or refused by name."""

from typing import Any

from quire.types.errors import NotSupported
from quire.types.extras import NO_EXTRAS, Extras


def read_extras(lora_request: Any = None, mm_processor_kwargs: Any = None) -> Extras:
    if lora_request is not None:
        raise NotSupported("lora_request cannot be used: LoRA adapters are not available yet", "lora_request")
    if mm_processor_kwargs:
        raise NotSupported("mm_processor_kwargs cannot be used: prompts are text", "mm_processor_kwargs")
    return NO_EXTRAS
