"""Schemes of quantized checkpoints, and linear methods for quantized weights."""
