"""Kernels: one family per file, each a plain function on tensors.

This package knows tensors only: no modules, model families or requests.
"""
