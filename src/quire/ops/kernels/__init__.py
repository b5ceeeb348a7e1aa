"""Triton kernels and their launchers, imported by the operation they belong to when its tensors are on a GPU.

Each launcher takes what the torch reference of the same name takes and gives back the same numbers. Nothing outside this
folder imports triton, so an installation without a GPU does not need it.
"""
