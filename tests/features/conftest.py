import gc

import pytest


@pytest.fixture
def exact_products():
    """transformers' results are those of float32, not of TF32."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()
