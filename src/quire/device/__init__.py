"""What the engine runs on: one folder for each device, behind one seam (`base.py`).

Nobody outside names a runtime, and nothing here knows requests, slots or plans.
"""
