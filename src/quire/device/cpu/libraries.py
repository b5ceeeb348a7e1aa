"""Which libraries are there. Imports none of them, nor torch."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from quire.ops.native import multiplies

ADVICE = (
    "nothing here multiplies by quantized weights as they are, so they are dequantized to float32: they take more memory and "
    "time; pip install 'quire[cpu]' on x86 Linux, or install Quire where a C compiler is on ARM"
)


@cache
def has_openvino() -> bool:
    """On other machines it would dequantize the numbers for good."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        version("openvino")
    except PackageNotFoundError:
        return False
    return True


def multiply_quantized() -> bool:
    """Does anybody multiply by numbers of few bits as they are?"""
    return has_openvino() or multiplies()
