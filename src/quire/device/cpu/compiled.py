"""A decoder's body compiled for a CPU: as one network where OpenVINO is faster and can take all of it, else in pieces."""

import logging
from collections.abc import Callable, Collection
from typing import Any

from quire.device.cpu.autotune import choose, runtime_for_blocks, runtime_for_floats
from quire.device.cpu.graph import Runtime
from quire.device.cpu.low_rank import LowRankTables
from quire.device.cpu.network import DecoderNetwork, find_forms
from quire.device.cpu.segments import Segments
from quire.device.cpu.trace import Trace, Untraceable, write_down
from quire.layers.lora import LinearBank
from quire.ops.native import adapts

logger = logging.getLogger(__name__)

Compiled = DecoderNetwork | Segments


def compile_body(
    body: Callable[[Any, Any], Any],
    columns: int,
    *,
    whole: bool,
    paged: bool,
    held: bool = False,
    banks: Collection[LinearBank] = (),
) -> Compiled | None:
    """`body` is a decoder's way from embedded tokens [T, columns] to its last hidden states.

    `whole`: it will not be run itself any more, and what it holds in matrices of floats is given back. `paged`: its cache can
    be as a network wants it. `held`: nothing is given back nevertheless. `banks`: of all that adapters may add to in it.
    """
    try:
        trace = write_down(body, columns)
    except Untraceable as reason:
        logger.info("the model runs layer by layer: %s cannot be compiled", reason)
        return None
    attending = find_forms(trace) if paged and not whole and not trace.divided and choose().openvino else None
    if attending:
        try:
            return DecoderNetwork(trace, attending)
        except RuntimeError as reason:  # OpenVINO's errors
            logger.warning("OpenVINO cannot run the model, so it is compiled in pieces: %s", reason)
    runtime = _runtime(blocks=not whole, floats=trace.has_floats)
    if runtime is Runtime.OWN and banks and adapts():
        trace = _with_adapters(body, columns, banks) or trace
    return None if runtime is None else Segments(trace, runtime, whole=whole, held=held)


def _with_adapters(body: Callable[[Any, Any], Any], columns: int, banks: Collection[LinearBank]) -> Trace | None:
    """With what adapters add, if that can be said of all banks."""
    tables = LowRankTables()
    try:
        trace = write_down(body, columns, tables)
    except Untraceable as reason:
        logger.info("rows with an adapter run layer by layer: %s cannot be compiled", reason)
        return None
    if tables.banks != {*banks}:
        return None
    tables.listen()
    return trace


def _runtime(*, blocks: bool, floats: bool) -> Runtime | None:
    """Who is best at both kinds of matrices, where there are both; else OpenVINO, which knows both."""
    of_blocks = runtime_for_blocks() if blocks else None
    of_floats = runtime_for_floats() if floats else None
    if of_blocks == of_floats or not (blocks and floats):
        return of_blocks or of_floats
    return Runtime.OPENVINO if Runtime.OPENVINO in (of_blocks, of_floats) else None
