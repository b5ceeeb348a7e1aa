"""Weights into models: sources of named tensors, and the assignment of each to its place.

This room knows checkpoint files and modules' claims. It knows no model family: names are changed by the model's `renames`.
"""
