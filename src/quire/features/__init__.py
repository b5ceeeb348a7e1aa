"""Capabilities that can be switched on, one folder each: `host.py` never imports torch, `device.py` may."""
