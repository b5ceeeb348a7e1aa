"""Passes over a model on the meta device, before loading: each changes how layers do their work.

A pass knows the kinds of layers, not the model families.
"""
