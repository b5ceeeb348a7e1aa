"""Building blocks of models.

A layer owns its parameters and names the checkpoint tensors that fill them (`weight_slices`). It does not know its model
family, where tensors come from, or how the KV cache is allocated.

What the loader calls on a module:
    weight_slices(path) -> the slices of each checkpoint tensor, by its name (`parameter.py`); None: optional and not read.
                           Without it, a module at `path` reads `path.<parameter name>` for each of its own parameters
    finish(device)         called once after all tensors are loaded
"""
