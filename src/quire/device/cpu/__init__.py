"""A CPU: kernels of our own in C (`program.py`, `tiles.py`) and libraries that are tried before they are used
(`autotune.py`), by which a decoder's body is compiled (`compiled.py`), and the process's memory."""
