"""Warm-up runs before the engine is ready, so that the first requests find their kernels compiled and loaded.

First one layer of each kind and each kind of draw, in parallel threads: kernels that were never compiled on this machine are
compiled at the same time. Then typical steps: decode, few and many rows, short and long contexts; prompts of several lengths;
both mixed; with each kind of sampling. Everything runs on the null page, and the results are dropped.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.attn.batch import PLAIN, Batch
from quire.dist.collectives import Group
from quire.layers.attention import SelfAttention
from quire.layers.latent import LatentAttention
from quire.layers.linear import Linear
from quire.models.blocks import fused_norm
from quire.models.decoder import Decoder
from quire.runner.batch import build_batch
from quire.runner.profile_run import GREEDY, MadeUpRequest, make_step
from quire.runner.sampler.pipeline import Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.types.plan import StepPlan
from quire.types.sampling import SamplingParams

logger = logging.getLogger(__name__)

RANDOM = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
PENALIZED = SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logprobs=5)
KINDS = (GREEDY, RANDOM, FILTERED, PENALIZED)
LONG = 1024  # tokens of a context whose attention is split
SINGLES = (1, 4, 16, 64, 256)  # decode rows
ALIKE = 8  # decode rows that share a prefix
PROMPTS = (2, 16, 128, 1024)  # tokens
DOZENS = (32, 64, 96, 128, 192)  # tokens, for layers that do not depend on rows
MIXED = 3  # decode rows in a step with a prompt
RECORDED = 4  # repetitions of a step, so that its CUDA graph is recorded and replayed
THREADS = 8
# rows of products that no graph is recorded for: in the last layer those that are drawn from, in the others all of a large
# step; the distances are odd, for which kernel suits a number of rows depends on its last bits too
FEW_ROWS, FEW_APART, MANY_APART = 512, 7, 97


@contextmanager
def apart(model: nn.Module, group: Group | None) -> Iterator[None]:
    """Detach layers from the other ranks: results do not matter, and ranks may have different layers."""
    meeting: list[Any] = [] if group is None else [layer for layer in model.modules() if getattr(layer, "group", None) is group]
    for layer in meeting:
        layer.group = None
    try:
        yield
    finally:
        for layer in meeting:
            layer.group = group


# ---- parts -----------------------------------------------------------------------------------------------------------------


def warm_up_parts(
    model: Decoder,
    slots: Slots,
    sampler: Sampler,
    vocabulary: int,
    longest: int,
    enter: Callable[[Batch], Tensor] | None = None,
) -> None:
    """Run each kind of layer in a thread of its own, for decode and for prompts, and each kind of draw.

    The slots must be free. A part that cannot be run like this is left to the steps. `enter`: what layers begin with, if the
    model does not embed.
    """
    layers = list(_layers(model, slots, longest, enter or model.embed))
    jobs = [*layers[:1], *_draws(slots, sampler, vocabulary), *layers[1:]]
    with ThreadPoolExecutor(THREADS, "quire-warm-up") as pool:
        for group in (jobs[:1], jobs[1:]):  # the first job initializes the compiler
            for future in [pool.submit(job) for job in group]:
                if (error := future.exception()) is not None:
                    logger.debug("a part of a step could not be run by itself", exc_info=error)
    drawn = np.arange(min(len(KINDS), len(slots.tokens)), dtype=np.int32)
    slots.retire(drawn)
    for slot in drawn.tolist():
        sampler.retire(slot)


def _layers(model: Decoder, slots: Slots, longest: int, enter: Callable[[Batch], Tensor]) -> Iterator[Callable[[], None]]:
    """Yield jobs, one layer each. Norms first: their kernels are small."""
    attentions, norms, others = kinds_of_layers(model)
    one, alike = [MadeUpRequest(longest, 1)], [MadeUpRequest(longest, 1)] * min(ALIKE, len(slots.tokens))
    long, prompt = [MadeUpRequest(longest, longest)], [MadeUpRequest(longest, min(longest, 16))]
    some = [MadeUpRequest(min(longest, DOZENS[1]), min(longest, DOZENS[1]))]
    for layer in norms:
        yield partial(_run, enter, _batch(one, slots), lambda x, _, layer=layer: layer.add(x, None))
        yield partial(_run, enter, _batch(one, slots), lambda x, _, layer=layer: layer.add(x, x))
        for reader in (*attentions, *others):  # activation quantization is fused into the norm for some readers
            yield partial(_run, enter, _batch(some, slots), partial(_fused_norm, layer, reader))
    for requests in (long, prompt, alike, one):  # the slowest first
        for layer in attentions:
            yield partial(_run, enter, _batch(requests, slots), layer)
    for requests in (prompt, one):
        for layer in others:
            yield partial(_run, enter, _batch(requests, slots), _feed(layer))
    matrices, dtype = distinct_matrices(model), next(model.parameters()).dtype
    for tokens in sorted({min(size, longest) for size in DOZENS}):
        for layer in others:
            yield partial(_run, enter, _batch([MadeUpRequest(tokens, tokens)], slots), _feed(layer))
        for matrix in matrices:
            yield partial(_multiply, matrix, torch.zeros(tokens, matrix.inputs, dtype=dtype, device=slots.device))
    for requests in (alike, one):
        yield partial(_run, enter, _batch(requests, slots), lambda x, batch: model.logits(x, batch.tokens))


@torch.inference_mode()
def warm_up_products(model: Decoder, hidden: Tensor, recorded: int, head: bool = True) -> None:
    """Products of steps with more tokens than are `recorded` as graphs; hidden [most tokens, H] has whatever numbers. `head`:
    the model has one.

    The libraries have dozens of kernels for those, choose by the exact number of rows, and load a kernel when they first choose
    it, for which they wait until the device is idle.
    """
    few = range(1, min(FEW_ROWS, len(hidden)), FEW_APART)
    for layer in distinct_matrices(model):
        x = hidden.new_zeros(len(hidden), layer.inputs)
        for rows in (*few, *range(recorded + 1, len(hidden) + 1, MANY_APART)):
            layer(x[:rows], PLAIN)
    for rows in few if head else ():
        model.logits(hidden[:rows], PLAIN)


def distinct_matrices(model: Decoder) -> list[Linear]:
    """Return one matrix of each size."""
    return list({(layer.inputs, layer.outputs): layer for layer in model.modules() if isinstance(layer, Linear)}.values())


def kinds_of_layers(model: Decoder) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Return one layer of each kind: attentions, norms, and the rest."""
    attentions: dict[object, nn.Module] = {}
    norms: dict[object, nn.Module] = {}
    others: dict[object, nn.Module] = {}
    for block in getattr(model, "layers", ()):
        for name, layer in block.named_children():
            if isinstance(layer, SelfAttention | LatentAttention):
                attentions.setdefault(layer.core.spec, layer)
            elif hasattr(layer, "add"):
                norms.setdefault(type(layer), layer)
            else:
                others.setdefault((type(layer), name), layer)
    return list(attentions.values()), list(norms.values()), list(others.values())


def _batch(requests: Sequence[MadeUpRequest], slots: Slots) -> Batch:
    plan = make_step(requests)
    slots.take_in(plan)
    batch = build_batch(plan, slots).batch
    slots.retire(plan.slot)
    return batch


def _draws(slots: Slots, sampler: Sampler, vocabulary: int) -> list[Callable[[], None]]:
    """Return two jobs: all kinds of draws, which share kernels, and what runs before and after a draw.

    The requests are not retired.
    """
    plan = make_step([MadeUpRequest(1, 1, params) for params in KINDS[: len(slots.tokens)]])
    slots.take_in(plan)
    for admission in plan.admitted:
        sampler.admit(admission.slot, admission)
    sampler.refresh(slots.updates)
    rows = build_batch(plan, slots).rows
    single = [rows.take(np.array([row])) for row in range(len(plan.slot))]
    return [partial(job, sampler, torch.zeros(1, vocabulary, device=slots.device), single) for job in (_draw, _edit)]


@torch.inference_mode()
def _draw(sampler: Sampler, logits: Tensor, each: Sequence[Rows]) -> None:
    for rows in each:
        if sampler.plain(rows.slots):
            sampler.sample(logits, rows)


@torch.inference_mode()
def _edit(sampler: Sampler, logits: Tensor, each: Sequence[Rows]) -> None:
    for rows in each:
        edited, _, raw = sampler.edit(logits, rows, None)
        sampler.report(torch.zeros(2, 1, dtype=torch.int32, device=logits.device), edited, raw, rows)


def _feed(layer: nn.Module) -> Callable[[Tensor, Batch], object]:
    return lambda x, batch: layer(x, batch.tokens)


def _fused_norm(norm: Any, reader: nn.Module, x: Tensor, _: Batch) -> None:
    for residual in (None, x):
        fused_norm(reader, norm, x, residual)


@torch.inference_mode()
def _multiply(matrix: Linear, x: Tensor) -> None:
    matrix(x, PLAIN)


@torch.inference_mode()
def _run(enter: Callable[[Batch], Tensor], batch: Batch, layer: Callable[..., object]) -> None:
    layer(enter(batch), batch)


# ---- steps -----------------------------------------------------------------------------------------------------------------


def warm_up_steps(max_seqs: int, max_tokens: int, longest: int) -> Iterator[StepPlan]:
    """Yield steps with requests of their own, which the next step retires; the last has none. No context exceeds `longest`."""
    before = 0
    for requests in _shapes(max_seqs, max_tokens, longest):
        yield make_step(requests, retired=before)
        before = len(requests)
    yield make_step((), retired=before)


def _shapes(max_seqs: int, max_tokens: int, long: int) -> Iterator[Sequence[MadeUpRequest]]:
    for params in KINDS:
        yield [MadeUpRequest(1, 1, params)]
    most = min(max_seqs, max_tokens)
    for rows in sorted({min(size, most) for size in SINGLES}):
        yield [MadeUpRequest(1 if row % 2 else long, 1, KINDS[row % len(KINDS)]) for row in range(rows)]
    for rows in sorted({1, min(4, most)}):
        for _ in range(RECORDED):
            yield [MadeUpRequest(long, 1, RANDOM)] * rows
    for tokens in (size for size in PROMPTS if size <= min(max_tokens, long)):
        yield [MadeUpRequest(tokens, tokens)]
        beside = min(MIXED, max_seqs - 1, max_tokens - tokens)
        if beside > 0:
            yield [MadeUpRequest(tokens, tokens, RANDOM), *[MadeUpRequest(long, 1)] * beside]
