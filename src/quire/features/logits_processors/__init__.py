"""Logits processors of users and other packages, with vLLM's interface.

interface.py  what users subclass          host.py    the argument, conflicts, memory
loading.py    classes from names           batch.py   requests as vLLM's persistent batch
device.py     the stage of the sampler
"""
