"""The package vllm for programs that run under `quire.compat`: what it has is Quire's."""

import sys

from quire.compat.modules import LazyModule

sys.modules[__name__].__class__ = LazyModule
