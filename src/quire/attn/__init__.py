"""Attention over paged keys and values.

This room knows the ragged batch, page tables and kernels. It does not know which model asks, nor who owns a page.
"""
