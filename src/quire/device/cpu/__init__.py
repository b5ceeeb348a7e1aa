"""The CPU device: own kernels in C (`program.py`, `repack.py`), OpenVINO where a test run shows that it is faster
(`autotune.py`), decoder bodies compiled for either (`prepare.py`), and the memory of the process (`process_memory.py`).
"""
