"""Ollama's API: requests are translated to chats, completions and embeddings, answers to lines of JSON (docs/ollama.md)."""
