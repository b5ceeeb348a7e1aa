"""Model families: mathematics only.

A family file makes the blocks and maps the names of its checkpoints. It knows neither where weights come from, nor the KV
cache, nor the kernels.
"""
