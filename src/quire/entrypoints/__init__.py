"""Where scripts written for vLLM look for the server."""
