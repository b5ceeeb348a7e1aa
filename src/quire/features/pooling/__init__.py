"""Pooling models: vectors, classes and scores of prompts instead of generated tokens."""
