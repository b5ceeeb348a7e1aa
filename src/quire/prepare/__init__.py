"""Passes over a model that was built on the meta device, before anything is loaded: each exchanges how layers do their work.

Families do not know them. A pass knows the kinds of layers, not the families.
"""
