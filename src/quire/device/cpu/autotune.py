"""What this CPU does well. Where there are kernels of our own, they are it, and nothing is tried. Elsewhere libraries are, once
for a CPU, a number of threads and versions of the libraries; the outcome is kept beside Quire's other files.

Others may be at work on the machine, so what counts is the processor time of one thread: a product that is kept waiting takes
no more of it.
"""

import logging
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from operator import gt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.device.cpu.graph import Runtime
from quire.device.cpu.libraries import has_openvino
from quire.device.cpu.product import Product, repack
from quire.files.gguf import GGML_TYPES
from quire.files.kept import WRONG, read_kept, what_is_wrong, write_kept
from quire.files.wheel import cache_directory
from quire.ops.blocks import QuantizedMatrix, dequantize
from quire.ops.dequantized_linear import dequantized_linear
from quire.ops.native import multiplies, multiplies_floats
from quire.progress import doing

logger = logging.getLogger(__name__)

MOST = 64  # CPUs and versions; the longest forgotten go
WAY = 3  # of trying; to be raised when it becomes another
CPU_INFO = Path("/proc/cpuinfo")
ABOUT = ("model name", "flags", "Features", "CPU")  # x86 writes the first two, ARM the others
OUTPUTS, INPUTS = 1536, 576
ROWS = (32, 48, 64, 96, 128, 192, 256, 512)  # at which dequantizing is tried
NEVER = 1 << 30
HOPELESS = 30  # times slower with the fewest rows: more will not help
SAME = 0.02  # of a product's size, by which rounding activations to 8 bits may change it
TRIES = 15  # of which the best counts


Ways = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Choice:
    own: bool  # Quire's own kernels multiply rows by numbers of few bits
    openvino: bool  # OpenVINO does, and keeps numbers of 4 bits as they are
    dequantize_from: int  # rows from which 4-bit numbers are worth dequantizing; NEVER = bfloat16 is slow here
    dequantize_others_from: int  # the same for other types, which take longer
    own_floats: bool  # Quire's own kernels multiply rows of float32


def runtime_for_blocks() -> Runtime | None:
    """Who multiplies few rows by numbers of few bits; None = nobody, and they are dequantized each time."""
    choice = choose()
    return Runtime.OWN if choice.own else Runtime.OPENVINO if choice.openvino else None


def runtime_for_floats() -> Runtime | None:
    """Who multiplies few rows of float32; None = torch."""
    return Runtime.OWN if choose().own_floats else None


def dequantize_from(quickly: bool) -> int:
    """Rows from which a matrix in blocks is worth dequantizing to bfloat16."""
    return choose().dequantize_from if quickly else choose().dequantize_others_from


OURS = Choice(own=True, openvino=False, dequantize_from=NEVER, dequantize_others_from=NEVER, own_floats=True)


@cache
def choose() -> Choice:
    if multiplies() and multiplies_floats():
        return OURS  # always best, and a row's numbers do not depend on how many rows there are
    path, key, known = cache_directory() / "cpu.json", _key(), dict[str, Choice]()
    try:
        for other, told in read_kept(path).items():
            with suppress(*(WRONG if other != key else ())):  # of others what can be read
                known[other] = _chosen(told)
    except FileNotFoundError:
        pass
    except (OSError, *WRONG) as error:
        logger.warning("%s: %s; what this CPU does well is tried again", path, what_is_wrong(error))
    if key in known:
        return known[key]
    with doing("trying what this CPU does well, once"):
        choice = measure()
    logger.debug("tried on this CPU: %s", choice)
    kept = [*known.items(), (key, choice)][-MOST:]
    write_kept(path, {name: asdict(found) for name, found in kept})
    return choice


def _chosen(told: Any) -> Choice:
    """Raises one of `WRONG`."""
    choice = Choice(**told)
    for field in fields(Choice):
        value = getattr(choice, field.name)
        if type(value) is not field.type or (type(value) is int and value not in (*ROWS, NEVER)):
            raise ValueError
    return choice


@torch.inference_mode()
def measure() -> Choice:
    own = multiplies()
    with _one_thread():
        by_openvino = not own and agrees()
        few = others = NEVER
        if own or by_openvino:
            runtime = Runtime.OWN if own else Runtime.OPENVINO
            few, others = (_measure_dequantizing(kind, runtime) for kind in ("Q4_0", "Q5_0"))
    return Choice(own, by_openvino, few, others, multiplies_floats())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other would spend processor time on that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _key() -> str:
    """The CPU by name and abilities, and everything else that speed depends on."""
    abilities = ""
    with suppress(OSError):
        lines = {line for line in CPU_INFO.read_text().splitlines() if line.startswith(ABOUT)}
        abilities = sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
    parts = platform.machine(), abilities, f"{torch.get_num_threads()} threads"
    there = {"torch": True, "openvino": has_openvino()}
    libraries = [f"{name} {version(name)}" for name in there if there[name]]
    libraries.append(f"own kernels: {multiplies()}, for floats: {multiplies_floats()}")
    return ", ".join([*parts, *libraries, f"way {WAY}"])


def _matrix(kind: str) -> QuantizedMatrix:
    [(number, nbytes)] = [(type_, nbytes) for type_, (name, _, nbytes) in GGML_TYPES.items() if name == kind]
    numbers = torch.randint(0, 60, (OUTPUTS, INPUTS // 32 * nbytes), dtype=torch.uint8)  # small scales, whatever the bytes are
    if kind == "Q4_1":  # offsets that can be folded
        numbers.view(-1, nbytes)[:, :4] = torch.tensor([0.01, -0.073], dtype=torch.float16).view(torch.uint8)
    return QuantizedMatrix(number, INPUTS, numbers)


def agrees() -> bool:
    """Does OpenVINO multiply as it should, also after it was told to do without what it was given?"""
    if not has_openvino():
        return False
    try:
        for kind in ("Q4_1", "Q8_0"):
            stored = _matrix(kind)
            weight = dequantize(stored.rows.flatten(), stored.type, (OUTPUTS, INPUTS))
            product = Product(repack([stored], None, Runtime.OPENVINO), Runtime.OPENVINO)
            some = [torch.randn(rows, INPUTS) for rows in (1, 40, 3)]
            differ = any(not (product(x) - x @ weight.t()).norm() < SAME * (x @ weight.t()).norm() for x in some)
            if differ or (kind == "Q4_1" and not product.keeps_numbers()):
                logger.warning("OpenVINO is installed, but does not multiply by %s here as it should", kind)
                return False
    except Exception as reason:  # of another release, whatever it may be
        logger.warning("OpenVINO is installed but of no use: %s", reason)
        return False
    return True


def _measure_dequantizing(kind: str, runtime: Runtime) -> int:
    stored = _matrix(kind)
    product = Product(repack([stored], None, runtime), runtime)
    ways: Ways = (product, lambda x: dequantized_linear(x, [stored], None))
    quantized, dequantized = _time(ways, ROWS[0], tries=3)
    if dequantized > HOPELESS * quantized:
        return NEVER
    at = bisect_left(ROWS, True, key=lambda rows: gt(*_time(ways, rows)))  # the more rows, the more worthwhile
    return ROWS[at] if at < len(ROWS) else NEVER


def _time(ways: Ways, rows: int, tries: int = TRIES) -> tuple[float, float]:
    """Seconds of both, which take turns; a first try of each does not count."""
    x = torch.randn(rows, INPUTS)
    found: tuple[list[float], list[float]] = [], []
    for _ in range(tries + 1):
        for multiply, seconds in zip(ways, found, strict=True):
            begun = time.process_time()
            multiply(x)
            seconds.append(time.process_time() - begun)
    return min(found[0][1:]), min(found[1][1:])
