"""Checkpoint files on disk: finding them, fetching them, reading their headers.

The package handles bytes, names and shapes. It does not know what a model computes, and never imports torch.
"""
