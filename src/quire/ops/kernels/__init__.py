"""Triton kernels and their launchers, imported by the operation they belong to when its tensors are on a GPU.

Each launcher has the arguments and results of the torch reference of the same name. Nothing outside this folder imports triton,
so an installation without a GPU does not need it.
"""
