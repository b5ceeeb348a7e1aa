"""LoRA adapters, chosen per request."""
