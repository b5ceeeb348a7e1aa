"""The HTTP server: one file per protocol, and what they share (errors, limits, streams, sampling parameters).

This room knows `AsyncLLM` and nothing below it: no scheduler, no engine process, no torch.
"""
