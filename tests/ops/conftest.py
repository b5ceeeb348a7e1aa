"""Kernels run on the GPU where there is one, elsewhere in Triton's interpreter (`tests/conftest.py`)."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, `tl.dot` adds the products of each value in the same order whatever the shapes, as a GPU does.
    The BLAS that numpy calls for it chooses kernels by shape on some processors."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
        rows, columns = np.ascontiguousarray(a), np.ascontiguousarray(b)  # the layout sets the order
        return np.multiply(rows[..., :, :, None], columns[..., None, :, :], dtype=dtype).sum(axis=-2)

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """The interpreter does again at every operation what it has done before, two thirds of its time: once will do."""
    try:
        from triton.language import core
        from triton.runtime import interpreter

        remap, scopes = interpreter._patch_lang, {}
        find_kind, make_type, make_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
        builder = interpreter.interpreter_builder
        # overflows are looked for, and told to nobody
        unwatched = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    except (ImportError, AttributeError, TypeError):  # no Triton, or another one
        yield
        return

    def remap_once(function):
        if id(function.__globals__) not in scopes:  # what is remapped depends on what the function's module sees
            scopes[id(function.__globals__)] = remap(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    kinds, types, shapes = {}, {}, {}

    def kind_of(tt_dtype):
        name = tt_dtype.scalar.name
        if name not in kinds:
            kinds[name] = find_kind(tt_dtype)
        return kinds[name]

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key], element_ty=element_ty)

    def tensor(self, handle, type):  # noqa: A002 - Triton's name
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = dict(self.__dict__)
        self.__dict__.update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", remap_once)
        patch.setattr(builder, "options", unwatched)
        patch.setattr(interpreter, "_get_np_dtype", kind_of)
        patch.setattr(core.block_type, "__init__", block_type)
        patch.setattr(core.tensor, "__init__", tensor)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
