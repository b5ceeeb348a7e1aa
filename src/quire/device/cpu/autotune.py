"""Choose the fastest kernels for this CPU. Own kernels are always best where they exist; then nothing is measured.

Otherwise libraries are measured once per CPU, number of threads and library versions, and the outcome is cached. Other
processes may use the CPU meanwhile, so what counts is the processor time of one thread, which waiting does not increase.
"""

import logging
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from operator import gt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.device.cpu.device import cpu_features, has_openvino
from quire.device.cpu.graph import Runtime
from quire.device.cpu.openvino import MAX_TOKENS, Network
from quire.device.cpu.repack import repack
from quire.device.cpu.session import packed_product
from quire.files.cache import STORE_ERRORS, cache_directory, lock_store, read_json_store, store_problem, write_json_store
from quire.files.gguf import GGML_TYPES
from quire.ops.blocks import QuantizedMatrix, dequantize
from quire.ops.dequantized_linear import dequantized_linear
from quire.ops.native import multiplies, multiplies_floats
from quire.progress import doing

logger = logging.getLogger(__name__)

MAX_ENTRIES = 64  # cached choices; the oldest are dropped
METHOD_VERSION = 4  # increase it when the measurement changes
OUTPUTS, INPUTS = 1536, 576
TOKEN_COUNTS = (32, 48, 64, 96, 128, 192, 256, 512)  # tokens at which dequantizing is measured
NEVER = 1 << 30
GIVE_UP_RATIO = 30  # if dequantizing is this many times slower with few tokens, more will not help
FEW_TOKENS = 6  # that OpenVINO 2026.4.1 multiplies correctly on CPUs with AVX2 only; with more, its products are wrong
TOLERANCE = 0.02  # relative error that 8-bit activations may cause
TRIES = 15  # the best one counts


Candidates = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Choice:
    """What is fastest on this CPU."""

    own: bool  # own kernels multiply by quantized weights
    openvino: bool  # OpenVINO does, and keeps 4-bit weights packed
    dequantize_from: int  # tokens from which dequantizing 4-bit weights is faster; NEVER: bfloat16 is slow
    dequantize_others_from: int  # the same for other types, which take longer to dequantize
    own_floats: bool  # own kernels multiply by float32 weights
    openvino_tokens: int = MAX_TOKENS  # per run of OpenVINO; fewer where its products are wrong with more

    @property
    def networks(self) -> bool:
        """Whether OpenVINO may run a whole decoder, in steps of any number of tokens."""
        return self.openvino and self.openvino_tokens == MAX_TOKENS


def runtime_for_blocks() -> Runtime | None:
    """Return the runtime for few tokens and quantized weights; None: weights are dequantized each time."""
    choice = choose()
    return Runtime.OWN if choice.own else Runtime.OPENVINO if choice.openvino else None


def runtime_for_floats() -> Runtime | None:
    """Return the runtime for few tokens and float32 weights; None: torch."""
    return Runtime.OWN if choose().own_floats else None


def dequantize_from(quickly: bool) -> int:
    """Return the number of tokens from which dequantizing a GGUF matrix to bfloat16 is faster."""
    return choose().dequantize_from if quickly else choose().dequantize_others_from


OWN_KERNELS = Choice(own=True, openvino=False, dequantize_from=NEVER, dequantize_others_from=NEVER, own_floats=True)


@cache
def choose() -> Choice:
    if multiplies() and multiplies_floats():
        return OWN_KERNELS  # always best, and batch-invariant
    choice = _read_or_measure()
    Network.max_tokens = choice.openvino_tokens
    return choice


def _read_or_measure() -> Choice:
    path, key = cache_directory() / "cpu.json", _key()
    with lock_store(path):  # ranks and engines that start at the same time make the same choice
        known = _read(path, key)
        if key in known:
            return known[key]
        with doing("measuring kernels for this CPU, once"):
            choice = measure()
        logger.debug("kernels measured on this CPU: %s", choice)
        entries = [*known.items(), (key, choice)][-MAX_ENTRIES:]
        write_json_store(path, {name: asdict(found) for name, found in entries})
    return choice


def _read(path: Path, key: str) -> dict[str, Choice]:
    """Return the valid entries of the store; none if that of `key` is invalid."""
    known = dict[str, Choice]()
    try:
        for other, stored in read_json_store(path).items():
            with suppress(*(STORE_ERRORS if other != key else ())):
                known[other] = _chosen(stored)
    except FileNotFoundError:
        pass
    except (OSError, *STORE_ERRORS) as error:
        logger.warning("%s: %s; the kernels for this CPU are measured again", path, store_problem(error))
    return known


def _chosen(stored: Any) -> Choice:
    """Return the choice that was stored. Raises one of `STORE_ERRORS` if it is invalid."""
    choice = Choice(**stored)
    for field in fields(Choice):
        value = getattr(choice, field.name)
        if type(value) is not field.type or (type(value) is int and value not in (*TOKEN_COUNTS, FEW_TOKENS, NEVER)):
            raise ValueError
    return choice


@torch.inference_mode()
def measure() -> Choice:
    own = multiplies()
    with _one_thread():
        by_openvino = not own and find_openvino_tokens()
        few = others = NEVER
        if own or by_openvino:
            runtime = Runtime.OWN if own else Runtime.OPENVINO
            few, others = (_measure_dequantizing(kind, runtime) for kind in ("Q4_0", "Q5_0"))
    return Choice(own, by_openvino, few, others, multiplies_floats(), Network.max_tokens)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: threads that wait for each other use processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _key() -> str:
    """Return the CPU's name and features, and all else that the speed depends on."""
    parts = platform.machine(), cpu_features(), f"{torch.get_num_threads()} threads"
    there = {"torch": True, "openvino": has_openvino()}
    libraries = [f"{name} {version(name)}" for name in there if there[name]]
    libraries.append(f"own kernels: {multiplies()}, for floats: {multiplies_floats()}")
    return ", ".join([*parts, *libraries, f"way {METHOD_VERSION}"])


def _matrix(kind: str) -> QuantizedMatrix:
    [(number, nbytes)] = [(type_, nbytes) for type_, (name, _, nbytes) in GGML_TYPES.items() if name == kind]
    numbers = torch.randint(0, 60, (OUTPUTS, INPUTS // 32 * nbytes), dtype=torch.uint8)  # small scales for any byte values
    if kind == "Q4_1":  # offsets that can become zero points
        numbers.view(-1, nbytes)[:, :4] = torch.tensor([0.01, -0.073], dtype=torch.float16).view(torch.uint8)
    return QuantizedMatrix(number, INPUTS, numbers)


def find_openvino_tokens() -> bool:
    """Set how many tokens OpenVINO multiplies correctly per run. Return whether it can be used at all."""
    if not has_openvino():
        return False
    if not find_problem(MAX_TOKENS) or not (problem := find_problem(FEW_TOKENS)):
        return True
    logger.warning("OpenVINO is not used: %s", problem)
    Network.max_tokens = MAX_TOKENS
    return False


def find_problem(tokens: int) -> str:
    """Return what is wrong with OpenVINO's products with this many tokens per run, also after the memory of its inputs was
    released; "" if nothing is. Further sessions have this limit.
    """
    Network.max_tokens = tokens
    try:
        for kind in ("Q4_1", "Q8_0"):
            stored = _matrix(kind)
            weight = dequantize(stored.rows.flatten(), stored.type, (OUTPUTS, INPUTS))
            product = packed_product(repack([stored], None, Runtime.OPENVINO), Runtime.OPENVINO)
            some = [torch.randn(rows, INPUTS) for rows in (1, 40, 3)]
            differ = any(not (product(x) - x @ weight.t()).norm() < TOLERANCE * (x @ weight.t()).norm() for x in some)
            if differ or (kind == "Q4_1" and not product.keeps_quantized()):
                return f"wrong products with {kind} weights on this CPU"
    except Exception as reason:  # other releases may raise anything
        return str(reason) or type(reason).__name__
    return ""


def _measure_dequantizing(kind: str, runtime: Runtime) -> int:
    stored = _matrix(kind)
    product = packed_product(repack([stored], None, runtime), runtime)
    candidates: Candidates = (product, lambda x: dequantized_linear(x, [stored], None))
    quantized, dequantized = _time(candidates, TOKEN_COUNTS[0], tries=3)
    if dequantized > GIVE_UP_RATIO * quantized:
        return NEVER
    at = bisect_left(TOKEN_COUNTS, True, key=lambda rows: gt(*_time(candidates, rows)))
    return TOKEN_COUNTS[at] if at < len(TOKEN_COUNTS) else NEVER


def _time(candidates: Candidates, rows: int, tries: int = TRIES) -> tuple[float, float]:
    """Return the seconds of both candidates, which take turns. The first run of each does not count."""
    x = torch.randn(rows, INPUTS)
    found: tuple[list[float], list[float]] = [], []
    for _ in range(tries + 1):
        for multiply, seconds in zip(candidates, found, strict=True):
            begun = time.process_time()
            multiply(x)
            seconds.append(time.process_time() - begun)
    return min(found[0][1:]), min(found[1][1:])
