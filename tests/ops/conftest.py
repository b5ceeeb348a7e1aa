"""Kernels run on the GPU where there is one, elsewhere in Triton's interpreter: that is chosen before they are defined."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def remapped_once() -> Iterator[None]:
    """The interpreter remaps Triton's whole language at every call within a kernel, a third of its time: once will do."""
    try:
        from triton.runtime import interpreter

        remap, scopes = interpreter._patch_lang, {}
    except (ImportError, AttributeError):  # no Triton, or another one
        yield
        return

    def once(function):
        if id(function.__globals__) not in scopes:  # what is remapped depends on what the function's module sees
            scopes[id(function.__globals__)] = remap(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
