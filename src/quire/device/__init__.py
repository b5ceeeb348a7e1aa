"""Devices that the engine runs on: one folder per device, all with the interface in `base.py`.

No other package imports a device runtime. Devices do not know requests, slots or step plans.
"""
