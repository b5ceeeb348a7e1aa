"""Building blocks of models.

A layer owns its parameters and says which checkpoint tensors fill them (`claims`). It does not know the family it serves,
where tensors come from, or how the cache is shared out.

What the loader looks for on a module, besides its parameters:
    claims(path) -> {checkpoint name: which slices of it go where (`claims.py`), or None = may be there and is not read}
                    without it, a module at `path` takes `path.<parameter name>` for each of its own parameters
    finish(device)  called once when every tensor is in place
"""
