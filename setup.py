"""Build the C kernels for CPUs: `quire.ops._native`, one file for every Python from 3.11 on (abi3).

QUIRE_KERNELS decides: unset, they are left out where they do not compile; 1, that is an error; 0, they are left out, and the
wheel is pure Python.
"""

import os
from glob import glob

from setuptools import Extension, setup

WANTED = os.environ.get("QUIRE_KERNELS", "")
if WANTED not in ("", "0", "1"):
    raise SystemExit(f"QUIRE_KERNELS must be 0 or 1; got {WANTED!r}. Unset it to build the kernels where there is a compiler.")

NATIVE = Extension(
    "quire.ops._native",
    sources=sorted(glob("src/quire/ops/native/*.c")),  # noqa: PTH207 (paths must be relative)
    depends=sorted(glob("src/quire/ops/native/*.h")),  # noqa: PTH207
    extra_compile_args=["-O3"],
    py_limited_api=True,
    optional=WANTED != "1",
)

setup(
    ext_modules=[] if WANTED == "0" else [NATIVE],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
