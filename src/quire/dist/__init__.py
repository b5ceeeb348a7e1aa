"""The ranks that run one model: their shares of it, and their communication. Knows tensors, not layers."""
