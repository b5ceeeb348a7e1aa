"""Checkpoint files on disk: finding them, fetching them, reading their headers.

This room knows bytes, names and shapes. It does not know what a model computes, and never imports torch.
"""
