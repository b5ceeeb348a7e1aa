"""What this CPU does well. Where there are kernels of our own, they are it, and nothing is tried. Elsewhere libraries are, once
for a CPU, a number of threads and versions of the libraries; the outcome is kept beside Quire's other files.

Others may be at work on the machine, so what counts is the processor time of one thread: a product that is kept waiting takes
no more of it. Only whether threads had better spin is a matter of the clock.
"""

import json
import logging
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from operator import gt
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.device.cpu import openvino, ort
from quire.device.cpu.gemm import Gemm, emit
from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.product import Product, repack
from quire.device.cpu.session import Session
from quire.files.gguf import GGML_TYPES
from quire.files.wheel import cache_directory
from quire.ops.blocks import Stored
from quire.ops.native import multiplies, multiplies_floats
from quire.ops.unfold import unfolded_linear
from quire.progress import doing

logger = logging.getLogger(__name__)

WAY = 2  # of trying; to be raised when it becomes another
CPU_INFO = Path("/proc/cpuinfo")
ABOUT = ("model name", "flags", "Features", "CPU")  # x86 writes the first two, ARM the others
OUTPUTS, INPUTS = 1536, 576
ROWS = (32, 48, 64, 96, 128, 192, 256, 512)  # at which unfolding is tried
NEVER = 1 << 30
LESS_MEMORY = 1.1  # times the seconds of the other way are still worth it, for what takes less
HOPELESS = 30  # times slower with the fewest rows: more will not help
SAME = 0.01  # of a product's size, by which two ways may differ
TRIES = 15  # of which the best counts
SPIN_TRIES = 60  # by the clock: a few of them will not have been kept waiting


Ways = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Choice:
    own: bool  # Quire's own kernels multiply rows by numbers of few bits
    unfold_from: int  # rows from which 4-bit numbers are worth unfolding; NEVER = bfloat16 is slow here
    unfold_others_from: int  # the same for other types, which take longer
    unfold_network_from: int  # both again, where OpenVINO multiplies few rows
    unfold_others_of_network_from: int
    own_floats: bool  # Quire's own kernels multiply few rows of float32
    runtime_floats: bool  # ONNX Runtime does so faster than torch
    fold: bool  # offsets among the numbers (`ops/nbits.py`) are no slower for ONNX Runtime than as a product of their own
    spin: bool  # threads of a run that wait for each other had better not sleep: not so where two share a core
    openvino: bool  # OpenVINO multiplies few rows by numbers of 4 bits faster than ONNX Runtime, and keeps them


def in_pieces() -> Runtime:
    """Who multiplies few rows by numbers of few bits, if it is not OpenVINO."""
    return Runtime.OWN if choose().own else Runtime.ONNX


def by_layer() -> Runtime:
    """Who multiplies few rows by numbers of few bits, where a layer's product is a call of its own."""
    return Runtime.OPENVINO if choose().openvino else in_pieces()


def of_floats() -> Runtime | None:
    """Who multiplies few rows of float32; None = torch."""
    choice = choose()
    if choice.own_floats:
        return Runtime.OWN
    return Runtime.ONNX if choice.runtime_floats else None


def unfold_from(quickly: bool, runtime: Runtime) -> int:
    """Rows from which a matrix in blocks is worth unfolding to bfloat16, if `runtime` multiplies fewer."""
    choice = choose()
    if runtime is Runtime.OPENVINO:
        return choice.unfold_network_from if quickly else choice.unfold_others_of_network_from
    return choice.unfold_from if quickly else choice.unfold_others_from


def folds(runtime: Runtime) -> bool:
    """Whether offsets go among the numbers. For OpenVINO they always do: it is faster, and takes less memory."""
    return runtime is Runtime.OPENVINO or choose().fold


OURS = Choice(True, NEVER, NEVER, NEVER, NEVER, own_floats=True, runtime_floats=False, fold=False, spin=False, openvino=False)


@cache
def choose() -> Choice:
    if multiplies() and multiplies_floats():
        return OURS  # always best, and a row's numbers do not depend on how many rows there are
    path, key, known = cache_directory() / "cpu.json", _key(), {}
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = dict(json.loads(path.read_text()))
        return Choice(**known[key])
    with doing("trying what this CPU does well, once"):
        choice = measure()
    logger.debug("tried on this CPU: %s", choice)
    with suppress(OSError):  # a cache that cannot be written only means trying again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps({**known, key: asdict(choice)}, indent=1))
        own.replace(path)
    return choice


@torch.inference_mode()
def measure() -> Choice:
    with_runtime = ort.available()
    own, own_floats = multiplies(), multiplies_floats()
    with _one_thread():
        by_openvino = with_runtime and not own and _measure_openvino()
        few = others = NEVER
        if own or with_runtime:
            few, others = (_measure_unfolding(kind, Runtime.OWN if own else Runtime.ONNX) for kind in ("Q4_0", "Q5_0"))
        of_network = few, others
        if by_openvino:
            of_network = _measure_unfolding("Q4_0", Runtime.OPENVINO), _measure_unfolding("Q5_0", Runtime.OPENVINO)
        floats = with_runtime and not own_floats and _measure_floats()
        fold = with_runtime and _measure_folding()
    spin = with_runtime and torch.get_num_threads() > 1 and _measure_spinning()
    return Choice(own, few, others, *of_network, own_floats, floats, fold, spin, by_openvino)


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
    there = {"torch": True, "onnxruntime": ort.available(), "openvino": openvino.available()}
    libraries = [f"{name} {version(name)}" for name in there if there[name]]
    return ", ".join([*parts, *libraries, f"way {WAY}"])


def _matrix(kind: str) -> Stored:
    [(number, nbytes)] = [(type_, nbytes) for type_, (name, _, nbytes) in GGML_TYPES.items() if name == kind]
    numbers = torch.randint(0, 60, (OUTPUTS, INPUTS // 32 * nbytes), dtype=torch.uint8)  # small scales, whatever the bytes are
    if kind == "Q4_1":  # offsets that can be folded
        numbers.view(-1, nbytes)[:, :4] = torch.tensor([0.01, -0.073], dtype=torch.float16).view(torch.uint8)
    return Stored(number, INPUTS, numbers)


def _product(kind: str, runtime: Runtime, fold: bool = False) -> Product:
    return Product(repack([_matrix(kind)], None, runtime, fold), runtime)


def _measure_openvino() -> bool:
    if not openvino.available():
        return False
    try:
        for kind, fold in (("Q4_1", True), ("Q4_1", False), ("Q8_0", False)):
            stored = _matrix(kind)
            ours, theirs = (
                Product(repack([stored], None, runtime, fold), runtime) for runtime in (Runtime.OPENVINO, Runtime.ONNX)
            )
            if not _agree(ours, theirs) or (kind == "Q4_1" and not ours.keeps_numbers()):
                logger.warning("OpenVINO is installed, but does not multiply by %s here as it should", kind)
                return False
    except Exception as reason:  # of another release, whatever it may be
        logger.warning("OpenVINO is installed but of no use: %s", reason)
        return False
    by_openvino, by_runtime = _time_few(
        (_product("Q4_1", Runtime.OPENVINO, fold=True), _product("Q4_1", Runtime.ONNX, fold=True))
    )
    return by_openvino < by_runtime


def _agree(ours: Product, theirs: Product) -> bool:
    """Also after it was told to do without what it was given."""
    for rows in (1, 40, 3):
        x = torch.randn(rows, INPUTS)
        expected = theirs(x).clone()
        if not (ours(x) - expected).norm() < SAME * expected.norm():
            return False
    return True


def _measure_unfolding(kind: str, runtime: Runtime) -> int:
    stored = _matrix(kind)
    product = Product(repack([stored], None, runtime, fold=False), runtime)
    ways: Ways = (product, lambda x: unfolded_linear(x, [stored], None))
    folded, unfolded = _time(ways, ROWS[0], tries=3)
    if unfolded > HOPELESS * folded:
        return NEVER
    at = bisect_left(ROWS, True, key=lambda rows: gt(*_time(ways, rows)))  # the more rows, the more worthwhile
    return ROWS[at] if at < len(ROWS) else NEVER


def _measure_floats() -> bool:
    weight = torch.randn(OUTPUTS, INPUTS)
    of_torch, of_runtime = _time_few((lambda x: F.linear(x, weight), Gemm(weight, None, Runtime.ONNX)))
    return of_runtime < of_torch


def _measure_folding() -> bool:
    stored, x = _matrix("Q4_1"), torch.randn(16, INPUTS)
    apart, folded = (Product(repack([stored], None, Runtime.ONNX, fold), Runtime.ONNX) for fold in (False, True))
    together = folded(x).clone()
    if not torch.equal(folded(x[:1]), together[:1]):  # a row would see the rows beside it
        return False
    of_apart, of_folded = _time_few((apart, folded))
    return of_folded < LESS_MEMORY * of_apart


def _measure_spinning() -> bool:
    """In a row of small products, as a decoder is."""
    ways = _chain(spin=False), _chain(spin=True)
    alone, few = (_time(ways, rows, SPIN_TRIES, time.perf_counter) for rows in (1, 16))
    return alone[1] + few[1] < alone[0] + few[0]


def _chain(spin: bool) -> Callable[[Tensor], Tensor]:
    graph, name, weight = Graph(), "x", torch.randn(OUTPUTS, INPUTS)
    for _ in range(4):
        for matrix in (weight, weight.t().contiguous()):
            [name] = emit(graph, name, matrix, None)
    session = Session(graph, [("x", INPUTS)], [(name, INPUTS)], spin=spin)
    return lambda x: session.run(x)[0]


def _time_few(ways: Ways) -> tuple[float, float]:
    """Seconds of both, for one row and for a few."""
    alone, few = _time(ways, 1), _time(ways, 16)
    return alone[0] + few[0], alone[1] + few[1]


def _time(ways: Ways, rows: int, tries: int = TRIES, clock: Callable[[], float] = time.process_time) -> tuple[float, float]:
    """Seconds of both, which take turns; a first try of each does not count."""
    x = torch.randn(rows, INPUTS)
    found: tuple[list[float], list[float]] = [], []
    for _ in range(tries + 1):
        for multiply, seconds in zip(ways, found, strict=True):
            begun = clock()
            multiply(x)
            seconds.append(clock() - begun)
    return min(found[0][1:]), min(found[1][1:])
