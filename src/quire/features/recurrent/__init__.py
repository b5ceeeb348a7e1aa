"""Recurrent layers: a state of fixed size per request instead of keys and values."""
