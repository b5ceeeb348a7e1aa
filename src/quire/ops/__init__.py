"""Kernels: one family per file, each a plain function on tensors.

This room knows tensors and numbers only: no modules, no model families, no requests.
"""
