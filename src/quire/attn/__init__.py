"""Attention over paged keys and values.

This package knows the ragged batch, page tables and kernels. It knows neither models nor the owners of pages.
"""
