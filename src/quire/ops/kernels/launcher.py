"""Launch Triton kernels with little host time.

Triton binds, types and looks up the arguments of every launch, which takes longer than the launch. A kernel that is `launched`
caches its compiled variants by what they depend on: dtypes of its tensors, whether their addresses are multiples of 16, the
kinds of its numbers, and its constants. The first launch of each variant is Triton's own; later ones pass addresses and numbers
to the variant's launcher. This is not Triton's public interface: if it differs from what is known here, in the interpreter, and
while launch hooks are installed, every launch is Triton's own.

    kernel[grid](tensors ..., numbers and descriptors ..., CONSTANTS=..., num_warps=..., ...)
"""

import importlib
import os
from collections.abc import Callable
from functools import cache, partial, reduce
from operator import attrgetter, or_
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import cuda
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.files.cache import cache_directory


@triton.jit
def tanh(x):
    """Return tanh(x), by an exponential that can underflow but not overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch(matrix, begin, end, STEP: tl.constexpr, MOST: tl.constexpr):
    """Prefetch blocks begin ... end of rows into the L2 cache; matrix [N, 1]: pointers."""
    at = tl.minimum(begin + tl.arange(0, MOST), end - 1)
    places = matrix + at[None, :] * STEP
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def overlapping() -> dict[str, bool]:
    """Return launch options for programmatic dependent launch, which requires Hopper or newer."""
    early = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


CHOICES = ("TRITON_CACHE_DIR", "TRITON_HOME")  # environment variables that choose the directory of compiled kernels


class Variants:
    """Count compilations and cache loads from installation on. An earlier listener is still called."""

    def __init__(self) -> None:
        self.compilations = self.loads = 0
        self._lock = Lock()  # kernels may be compiled on several threads
        self._previous: Any = None

    def install(self) -> "Variants":
        self._previous, knobs.compilation.listener = knobs.compilation.listener, self
        return self

    def __call__(self, *, cache_hit: bool, **details: Any) -> None:
        with self._lock:
            self.loads += cache_hit
            self.compilations += not cache_hit
        if self._previous is not None:
            self._previous(cache_hit=cache_hit, **details)


def choose_cache() -> None:
    """Store compiled kernels in Quire's cache directory, unless the user chose another."""
    if not any(os.environ.get(name) for name in CHOICES):
        os.environ["TRITON_CACHE_DIR"] = str(cache_directory() / "triton")


choose_cache()
VARIANTS = Variants().install()


# grid, stream, function; cooperative, overlapping; scratch memory of kernel and profiler; sizes; three for hooks
LAUNCHER_FORMAT = "iiiKKppOOOOOO"
ALIGNED = 16  # bytes, or a factor of integers
INT32 = range(-(1 << 31), 1 << 31)
REST_OF_GRID = ((1, 1, 1), (1, 1), (1,), ())

address_of = Tensor.data_ptr
dtype_of = attrgetter("dtype")


def launched(kernel: Any) -> Any:
    """Decorate a kernel, above `triton.jit`."""
    return Launched(kernel) if isinstance(kernel, JITFunction) and LISTENERS is not None else kernel


class Launched:
    def __init__(self, kernel: Any) -> None:
        constant = [parameter.is_constexpr for parameter in kernel.params]
        assert constant == sorted(constant), f"the constants of {kernel.__name__} do not come last"
        self.kernel = kernel
        self._constants = (None,) * sum(constant)  # a launcher requires them, but ignores them
        self._tensors: int | None = None  # number of arguments that are tensors; they come first
        self._variants: dict[tuple[object, ...], tuple[Callable[..., None], tuple[object, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if self._tensors is None:
            self._tensors = sum(isinstance(argument, Tensor) for argument in arguments)
        tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
        addresses = [*map(address_of, tensors)]
        device = driver.active.get_current_device()
        key = (device, *map(dtype_of, tensors), *map(kind_of, numbers), *options, *options.values())
        if reduce(or_, addresses, 0) % ALIGNED:
            key = (*key, *(address % ALIGNED == 0 for address in addresses))
        variant = self._variants.get(key)
        if variant is None or any(LISTENERS or ()):
            self._launch_by_triton(grid, key, arguments, options)
            return
        launcher, fixed = variant
        stream = driver.active.get_current_stream(device)
        launcher(*grid, *REST_OF_GRID[len(grid)], stream, *fixed, *addresses, *numbers, *self._constants)

    def _launch_by_triton(
        self, grid: tuple[int, ...], key: tuple[object, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        compiled = self.kernel[grid](*arguments, **options)
        variant = variant_of(compiled)
        if variant is not None:
            self._variants[key] = variant


def kind_of(number: Any) -> object:
    """Return what a variant may depend on for an argument: at least as fine as Triton's own distinctions."""
    if type(number) is int:
        if number == 1:
            return "one"
        multiple = number % ALIGNED == 0
        return multiple if number in INT32 else (multiple, number.bit_length() > 63)
    if isinstance(number, TensorDescriptor):
        return (number.base.dtype, *number.block_shape, number.padding)
    return type(number)


def variant_of(compiled: Any) -> tuple[Callable[..., None], tuple[object, ...]] | None:
    """Return the launcher of a compiled kernel, and its arguments between stream and the kernel's; None: unknown interface."""
    try:
        taken = importlib.import_module("triton.backends.nvidia.driver")._BASE_ARGS_FORMAT
        run, sizes = compiled.run, compiled.packed_metadata
        known = taken == LAUNCHER_FORMAT and len(sizes) == 3 and run.num_ctas == 1
        no_scratch = run.global_scratch_size == run.profile_scratch_size == 0
        fixed = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, sizes, None, None, None
        )  # fmt: skip
        return (run.launch, fixed) if known and no_scratch else None
    except (ImportError, AttributeError, TypeError):
        return None


def _find_listeners() -> tuple[list[Any], list[Any]] | None:
    try:
        return knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    except AttributeError:
        return None


LISTENERS = _find_listeners()  # launch hooks; None: not where expected
