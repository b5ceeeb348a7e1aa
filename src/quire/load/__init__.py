"""Load weights into models: sources of named tensors, and the assignment of each to its parameters.

This package knows checkpoint files and modules' weight slices, but no model family: a model's `renames` map the names.
"""
