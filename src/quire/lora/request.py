"""LoRARequest under the name that vLLM's users import it from."""

from quire.types.adapter import LoRARequest

__all__ = ["LoRARequest"]
