"""Speculative decoding: draft tokens that the model verifies several at a time."""
