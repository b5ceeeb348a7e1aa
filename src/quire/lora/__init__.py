"""Where scripts written for vLLM look for what they ask for an adapter with."""
