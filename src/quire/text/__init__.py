"""Text to tokens and back: tokenizers, chat templates, incremental detokenization, stop strings.

This room knows nothing of torch, of scheduling or of sockets.
"""
