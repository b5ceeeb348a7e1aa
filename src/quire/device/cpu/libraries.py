"""Which libraries are there, and what they can do. Imports none of them, nor torch."""

from importlib.util import find_spec

from quire.ops.native import multiplies

ADVICE = (
    "onnxruntime is not installed, so quantized weights are unfolded to float32: they take more memory and time; "
    "pip install 'quire[cpu]' for the fast path"
)


def has_onnxruntime() -> bool:
    return find_spec("onnxruntime") is not None


def multiply_quantized() -> bool:
    """Does anybody multiply by numbers of few bits as they are?"""
    return has_onnxruntime() or multiplies()
