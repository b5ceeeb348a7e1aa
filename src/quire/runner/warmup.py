"""Warm-up and profile runs before the engine is ready, so that the first requests find kernels compiled and loaded.

First one layer of each kind and each kind of sampling run in parallel threads, so that kernels are compiled at the same time.
Then typical steps follow: decode, few and many rows, short and long contexts, prompts of several lengths, both mixed, with each
kind of sampling. Everything runs on the null page, and the results are dropped.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from quire.runner.sampler.pipeline import Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.types.plan import Admission, Outputs, RowShapes, StepPlan
from quire.types.sampling import SamplingParams

logger = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0.0)
COSTLY = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=1)  # parameters that take the most memory
RANDOM = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
PENALIZED = SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logprobs=5)
KINDS = (GREEDY, RANDOM, FILTERED, PENALIZED)
LONG = 1024  # tokens of a context whose attention is split
DECODE_ROWS = (1, 4, 16, 64, 256)  # decode rows
SHARED_ROWS = 8  # decode rows that share a prefix
PROMPTS = (2, 16, 128, 1024)  # tokens
TOKEN_COUNTS = (32, 64, 96, 128, 192)  # tokens, for layers that do not depend on rows
MIXED = 3  # decode rows in a step with a prompt
RECORDED = 4  # repetitions of a step, so that its CUDA graph is recorded and replayed
THREADS = 8
# tokens of GEMMs that no graph contains: the sampled tokens in the LM head, all tokens of a large step in other layers.
# The steps are odd, because the choice of a kernel also depends on the low bits of the number of tokens
FEW_ROWS, FEW_STEP, MANY_STEP = 512, 7, 97


@dataclass(frozen=True)
class MadeUpRequest:
    """A request of `length` known tokens, of which the last `count` and `drafts` draft tokens are run."""

    length: int
    count: int
    params: SamplingParams = GREEDY
    drafts: int = 0


def largest_step(max_seqs: int, max_batched_tokens: int, longest: int, drafts: int = 0) -> StepPlan:
    """Return the largest step: max_seqs rows share max_batched_tokens tokens, with the costliest sampling and all drafts.

    longest: no row is longer.
    """
    drafts = min(drafts, longest - 1, max_batched_tokens - 1)
    rows = min(max_seqs, max_batched_tokens // (1 + drafts))
    each, more = divmod(min(max_batched_tokens, rows * longest), rows)
    more = min(more, longest - each)
    known = [size - drafts for size in [each + more] + [each] * (rows - 1)]
    return make_step([MadeUpRequest(size, size, COSTLY, drafts) for size in known])


def make_step(requests: Sequence[MadeUpRequest], retired: int = 0) -> StepPlan:
    """Return a step of new requests in slots 0, 1, ..., which all sample. The first `retired` slots are retired before.

    No table entry is written: every token uses the null page.
    """
    rows = len(requests)
    drafts = np.array([request.drafts for request in requests], np.int32)
    count = drafts + np.array([request.count for request in requests], np.int32)
    return StepPlan(
        step=0,
        retired=np.arange(retired, dtype=np.int32),
        admitted=tuple(_admit(slot, request) for slot, request in enumerate(requests)),
        slot=np.arange(rows, dtype=np.int32),
        end=drafts + np.array([request.length for request in requests], np.int32),
        shapes=RowShapes(count, drafts, Outputs.last(count, 1 + drafts)),
        guesses=drafts,
    )


def _admit(slot: int, request: MadeUpRequest) -> Admission:
    tokens, start = np.zeros(request.length, np.int32), request.length - request.count
    return Admission(slot, tokens, request.length, start, request.params, seed=slot, stop_ids=(), bad_words=())


@contextmanager
def without_ranks(model: nn.Module, group: Group | None) -> Iterator[None]:
    """Detach layers from the other ranks: results do not matter, and ranks may have different layers."""
    connected: list[Any] = (
        [] if group is None else [layer for layer in model.modules() if getattr(layer, "group", None) is group]
    )
    for layer in connected:
        layer.group = None
    try:
        yield
    finally:
        for layer in connected:
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
    """Run each kind of layer in its own thread, for decode and for prompts, and each kind of sampling.

    The slots must be free. A layer that cannot run alone runs first in a whole step. `enter`: returns the input of the first
    layer, if the model does not embed.
    """
    layers = list(_layers(model, slots, longest, enter or model.embed))
    jobs = [*layers[:1], *_samples(slots, sampler, vocabulary), *layers[1:]]
    with ThreadPoolExecutor(THREADS, "quire-warm-up") as pool:
        for group in (jobs[:1], jobs[1:]):  # the first job initializes the compiler
            for future in [pool.submit(job) for job in group]:
                if (error := future.exception()) is not None:
                    logger.debug("a layer could not run alone; it runs first in a whole step", exc_info=error)
    sampled = np.arange(min(len(KINDS), len(slots.tokens)), dtype=np.int32)
    slots.retire(sampled)
    for slot in sampled.tolist():
        sampler.retire(slot)


def _layers(model: Decoder, slots: Slots, longest: int, enter: Callable[[Batch], Tensor]) -> Iterator[Callable[[], None]]:
    """Yield jobs, one layer each. Norms first: their kernels are small."""
    attentions, norms, others = kinds_of_layers(model)
    built = partial(_batch, slots=slots, whole=not model.keeps_context)
    one, alike = [MadeUpRequest(longest, 1)], [MadeUpRequest(longest, 1)] * min(SHARED_ROWS, len(slots.tokens))
    long, prompt = [MadeUpRequest(longest, longest)], [MadeUpRequest(longest, min(longest, 16))]
    some = [MadeUpRequest(min(longest, TOKEN_COUNTS[1]), min(longest, TOKEN_COUNTS[1]))]
    for layer in norms:
        yield partial(_run, enter, built(one), lambda x, _, layer=layer: layer.add(x, None))
        yield partial(_run, enter, built(one), lambda x, _, layer=layer: layer.add(x, x))
        for reader in (*attentions, *others):  # activation quantization is fused into the norm for some readers
            yield partial(_run, enter, built(some), partial(_fused_norm, layer, reader))
    for requests in (long, prompt, alike, one):  # the slowest first
        for layer in attentions:
            yield partial(_run, enter, built(requests), layer)
    for requests in (prompt, one):
        for layer in others:
            yield partial(_run, enter, built(requests), _feed(layer))
    matrices, dtype = distinct_matrices(model), next(model.parameters()).dtype
    for tokens in sorted({min(size, longest) for size in TOKEN_COUNTS}):
        for layer in others:
            yield partial(_run, enter, built([MadeUpRequest(tokens, tokens)]), _feed(layer))
        for matrix in matrices:
            yield partial(_multiply, matrix, torch.zeros(tokens, matrix.inputs, dtype=dtype, device=slots.device))
    for requests in (alike, one):
        yield partial(_run, enter, built(requests), lambda x, batch: model.logits(x, batch.tokens))


@torch.inference_mode()
def warm_up_products(model: Decoder, hidden: Tensor, recorded: int, head: bool = True) -> None:
    """Run GEMMs with more tokens than graphs contain; hidden [most tokens, H] has any values. `head`: the model has one.

    GEMM libraries have dozens of kernels for those. They choose by the exact number of tokens and load a kernel at its first
    use, for which they wait until the device is idle.
    """
    few = range(1, min(FEW_ROWS, len(hidden)), FEW_STEP)
    for layer in distinct_matrices(model):
        x = hidden.new_zeros(len(hidden), layer.inputs)
        for rows in (*few, *range(recorded + 1, len(hidden) + 1, MANY_STEP)):
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


def _batch(requests: Sequence[MadeUpRequest], slots: Slots, whole: bool) -> Batch:
    plan = make_step(_without_contexts(requests) if whole else requests)
    slots.take_in(plan)
    batch = build_batch(plan, slots).batch
    slots.retire(plan.slot)
    return batch


def _samples(slots: Slots, sampler: Sampler, vocabulary: int) -> list[Callable[[], None]]:
    """Return two jobs: all kinds of sampling, which share kernels, and what runs before and after sampling.

    The requests are not retired.
    """
    plan = make_step([MadeUpRequest(1, 1, params) for params in KINDS[: len(slots.tokens)]])
    slots.take_in(plan)
    for admission in plan.admitted:
        sampler.admit(admission.slot, admission)
    sampler.columns.refresh(slots.updates)
    rows = build_batch(plan, slots).rows
    single = [rows.take(np.array([row])) for row in range(len(plan.slot))]
    return [partial(job, sampler, torch.zeros(1, vocabulary, device=slots.device), single) for job in (_sample, _edit)]


@torch.inference_mode()
def _sample(sampler: Sampler, logits: Tensor, each: Sequence[Rows]) -> None:
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


def warm_up_steps(max_seqs: int, max_tokens: int, longest: int, whole: bool = False) -> Iterator[StepPlan]:
    """Yield steps with requests of their own, which the next step retires; the last has none. No context exceeds `longest`.

    whole: every request is whole in its step.
    """
    before = 0
    for requests in _shapes(max_seqs, max_tokens, longest):
        yield make_step(_without_contexts(requests) if whole else requests, retired=before)
        before = len(requests)
    yield make_step((), retired=before)


def _without_contexts(requests: Sequence[MadeUpRequest]) -> Sequence[MadeUpRequest]:
    return [replace(request, length=request.count) for request in requests]


def _shapes(max_seqs: int, max_tokens: int, long: int) -> Iterator[Sequence[MadeUpRequest]]:
    for params in KINDS:
        yield [MadeUpRequest(1, 1, params)]
    most = min(max_seqs, max_tokens)
    for rows in sorted({min(size, most) for size in DECODE_ROWS}):
        yield [MadeUpRequest(1 if row % 2 else long, 1, KINDS[row % len(KINDS)]) for row in range(rows)]
    for rows in sorted({1, min(4, most)}):
        for _ in range(RECORDED):
            yield [MadeUpRequest(long, 1, RANDOM)] * rows
    for tokens in (size for size in PROMPTS if size <= min(max_tokens, long)):
        yield [MadeUpRequest(tokens, tokens)]
        decode = min(MIXED, max_seqs - 1, max_tokens - tokens)
        if decode > 0:
            yield [MadeUpRequest(tokens, tokens, RANDOM), *[MadeUpRequest(long, 1)] * decode]
