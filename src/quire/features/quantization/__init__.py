"""Quantized weights."""
