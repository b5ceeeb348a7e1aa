"""Launching a Triton kernel with little work on the host.

Triton binds, types and looks up the arguments of every launch anew, which takes longer than the launch itself. A kernel that is
`launched` remembers its compiled forms by what they depend on: the types of its tensors and whether their addresses are
multiples of 16, the kinds of its numbers, and its constants. The first launch of each kind is Triton's own; later ones hand
addresses and numbers straight to the form's launcher. What that takes is not Triton's public interface: where it is not as
known here, in the interpreter, and while somebody listens to launches, every launch is Triton's own.

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

from quire.files.wheel import cache_directory


@triton.jit
def tanh(x):
    """By an exponential that can vanish but not overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


def cdiv(size: int, block: int) -> int:
    """How many blocks it takes."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The least that is not smaller."""
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
def ask_for(matrix, begin, end, STEP: tl.constexpr, MOST: tl.constexpr):
    """Blocks begin ... end of rows, matrix [N, 1] pointers, are brought near, and not waited for."""
    at = tl.minimum(begin + tl.arange(0, MOST), end - 1)
    places = matrix + at[None, :] * STEP
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def overlapping() -> dict[str, bool]:
    """How to launch such a kernel: Hopper and later can, older devices and the interpreter run it as any other."""
    early = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


CHOICES = ("TRITON_CACHE_DIR", "TRITON_HOME")  # environment: where the user wants compiled kernels to be kept


class Variants:
    """Counts from the moment it is installed. Whoever listened to the compiler before goes on doing so."""

    def __init__(self) -> None:
        self.compilations = self.loads = 0
        self._lock = Lock()  # kernels may be compiled on several threads
        self._before: Any = None

    def install(self) -> "Variants":
        self._before, knobs.compilation.listener = knobs.compilation.listener, self
        return self

    def __call__(self, *, cache_hit: bool, **told: Any) -> None:
        with self._lock:
            self.loads += cache_hit
            self.compilations += not cache_hit
        if self._before is not None:
            self._before(cache_hit=cache_hit, **told)


def choose_cache() -> None:
    """Compiled kernels are kept beside Quire's other files, unless the user chose a place."""
    if not any(os.environ.get(name) for name in CHOICES):
        os.environ["TRITON_CACHE_DIR"] = str(cache_directory() / "triton")


choose_cache()
VARIANTS = Variants().install()


# grid, stream, function; cooperative, overlapping; scratch memory, of the kernel and of profiles; sizes; three for listeners
TAKEN = "iiiKKppOOOOOO"
ALIGNED = 16  # bytes, or times
INT32 = range(-(1 << 31), 1 << 31)
REST_OF_GRID = ((1, 1, 1), (1, 1), (1,), ())

address_of = Tensor.data_ptr
dtype_of = attrgetter("dtype")


def launched(kernel: Any) -> Any:
    """A decorator above `triton.jit`."""
    return Launched(kernel) if isinstance(kernel, JITFunction) and LISTENERS is not None else kernel


class Launched:
    def __init__(self, kernel: Any) -> None:
        constant = [parameter.is_constexpr for parameter in kernel.params]
        assert constant == sorted(constant), f"the constants of {kernel.__name__} do not come last"
        self.kernel = kernel
        self._constants = (None,) * sum(constant)  # a launcher takes them, and does not look at them
        self._tensors: int | None = None  # how many arguments are tensors: the first ones
        self._forms: dict[tuple[object, ...], tuple[Callable[..., None], tuple[object, ...]]] = {}

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
        form = self._forms.get(key)
        if form is None or any(LISTENERS or ()):
            self._launch_as_triton_does(grid, key, arguments, options)
            return
        launcher, fixed = form
        stream = driver.active.get_current_stream(device)
        launcher(*grid, *REST_OF_GRID[len(grid)], stream, *fixed, *addresses, *numbers, *self._constants)

    def _launch_as_triton_does(
        self, grid: tuple[int, ...], key: tuple[object, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        compiled = self.kernel[grid](*arguments, **options)
        form = form_of(compiled)
        if form is not None:
            self._forms[key] = form


def kind_of(number: Any) -> object:
    """What a compiled form may depend on: at least as fine as Triton's own distinctions."""
    if type(number) is int:
        if number == 1:
            return "one"
        multiple = number % ALIGNED == 0
        return multiple if number in INT32 else (multiple, number.bit_length() > 63)
    if isinstance(number, TensorDescriptor):
        return (number.base.dtype, *number.block_shape, number.padding)
    return type(number)


def form_of(compiled: Any) -> tuple[Callable[..., None], tuple[object, ...]] | None:
    """The launcher of a compiled kernel, and what it takes between the stream and the arguments; None = it is not as known."""
    try:
        taken = importlib.import_module("triton.backends.nvidia.driver")._BASE_ARGS_FORMAT
        run, sizes = compiled.run, compiled.packed_metadata
        known = taken == TAKEN and len(sizes) == 3 and run.num_ctas == 1
        alone = run.global_scratch_size == run.profile_scratch_size == 0
        fixed = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, sizes, None, None, None
        )  # fmt: skip
        return (run.launch, fixed) if known and alone else None
    except (ImportError, AttributeError, TypeError):
        return None


def _find_listeners() -> tuple[list[Any], list[Any]] | None:
    try:
        return knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    except AttributeError:
        return None


LISTENERS = _find_listeners()  # those who are told of each launch; None = not where they are known to be
