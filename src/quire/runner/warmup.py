"""What is run before the engine is ready, so that the first requests find their kernels compiled and loaded.

First one layer of each kind and each kind of draw by itself, all at once: kernels that were never compiled on this machine are
compiled side by side. Then steps of the shapes that traffic has: rows of one token, few and many, with short and long contexts;
prompts of several lengths; both together; each with the kinds of sampling there are. Everything runs on the null page, and what
it computes is thrown away. Which kernels there are is not known here: layers and steps are run as any are.
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
from quire.layers.norm_for import norm_for
from quire.models.decoder import Decoder
from quire.runner.batch import build_batch
from quire.runner.profile_run import GREEDY, Tenant, make_step
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
LONG = 1024  # tokens of a context that is worked on in several pieces
SINGLES = (1, 4, 16, 64, 256)  # rows of one token
ALIKE = 8  # rows of one token that begin with the same pages
PROMPTS = (2, 16, 128, 1024)  # tokens
DOZENS = (32, 64, 96, 128, 192)  # tokens, one row or many, for layers that do not care which
MIXED = 3  # rows of one token beside a prompt
RECORDED = 4  # times a step is repeated, so that it is recorded and replayed where steps are
THREADS = 8
# rows of products that no graph is recorded for: in the last layer those that are drawn from, in the others all of a large
# step; the distances are odd, for which kernel suits a number of rows depends on its last bits too
FEW_ROWS, FEW_APART, MANY_APART = 512, 7, 97


@contextmanager
def apart(model: nn.Module, group: Group | None) -> Iterator[None]:
    """Layers do not wait for those of other ranks: what they compute does not matter, and ranks may have different ones."""
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
    """Each kind of layer on a thread of its own, for rows of one token and for prompts, and each kind of draw.

    The slots must be free. A part that cannot be run like this is left to the steps. `enter`: what layers begin with, if the
    model does not embed.
    """
    layers = list(_layers(model, slots, longest, enter or model.embed))
    jobs = [*layers[:1], *_draws(slots, sampler, vocabulary), *layers[1:]]
    with ThreadPoolExecutor(THREADS, "quire-warm-up") as pool:
        for group in (jobs[:1], jobs[1:]):  # the compiler itself gets ready, once
            for future in [pool.submit(job) for job in group]:
                if (error := future.exception()) is not None:
                    logger.debug("a part of a step could not be run by itself", exc_info=error)
    drawn = np.arange(min(len(KINDS), len(slots.tokens)), dtype=np.int32)
    slots.retire(drawn)
    for slot in drawn.tolist():
        sampler.retire(slot)


def _layers(model: Decoder, slots: Slots, longest: int, enter: Callable[[Batch], Tensor]) -> Iterator[Callable[[], None]]:
    """Norms first: their kernels are small."""
    attentions, norms, others = kinds_of_layers(model)
    one, alike = [Tenant(longest, 1)], [Tenant(longest, 1)] * min(ALIKE, len(slots.tokens))
    long, prompt = [Tenant(longest, longest)], [Tenant(longest, min(longest, 16))]
    some = [Tenant(min(longest, DOZENS[1]), min(longest, DOZENS[1]))]
    for layer in norms:
        yield partial(_run, enter, _batch(one, slots), lambda x, _, layer=layer: layer.add(x, None))
        yield partial(_run, enter, _batch(one, slots), lambda x, _, layer=layer: layer.add(x, x))
        for reader in (*attentions, *others):  # some round what they read, and norms do it for them
            yield partial(_run, enter, _batch(some, slots), partial(_norm_for, layer, reader))
    for tenants in (long, prompt, alike, one):  # what takes longest comes first
        for layer in attentions:
            yield partial(_run, enter, _batch(tenants, slots), layer)
    for tenants in (prompt, one):
        for layer in others:
            yield partial(_run, enter, _batch(tenants, slots), _feed(layer))
    matrices, dtype = distinct_matrices(model), next(model.parameters()).dtype
    for tokens in sorted({min(size, longest) for size in DOZENS}):
        for layer in others:
            yield partial(_run, enter, _batch([Tenant(tokens, tokens)], slots), _feed(layer))
        for matrix in matrices:
            yield partial(_multiply, matrix, torch.zeros(tokens, matrix.inputs, dtype=dtype, device=slots.device))
    for tenants in (alike, one):
        yield partial(_run, enter, _batch(tenants, slots), lambda x, batch: model.logits(x, batch.tokens))


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
    """One of each size."""
    return list({(layer.inputs, layer.outputs): layer for layer in model.modules() if isinstance(layer, Linear)}.values())


def kinds_of_layers(model: Decoder) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """One layer of each kind: attentions, norms, and the rest."""
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


def _batch(tenants: Sequence[Tenant], slots: Slots) -> Batch:
    plan = make_step(tenants)
    slots.take_in(plan)
    batch = build_batch(plan, slots).batch
    slots.retire(plan.slot)
    return batch


def _draws(slots: Slots, sampler: Sampler, vocabulary: int) -> list[Callable[[], None]]:
    """All kinds of draws one after the other, for they have kernels in common; what is done before and after a draw meanwhile.
    The tenants are not retired."""
    plan = make_step([Tenant(1, 1, params) for params in KINDS[: len(slots.tokens)]])
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


def _norm_for(norm: Any, reader: nn.Module, x: Tensor, _: Batch) -> None:
    for residual in (None, x):
        norm_for(reader, norm, x, residual)


@torch.inference_mode()
def _multiply(matrix: Linear, x: Tensor) -> None:
    matrix(x, PLAIN)


@torch.inference_mode()
def _run(enter: Callable[[Batch], Tensor], batch: Batch, layer: Callable[..., object]) -> None:
    layer(enter(batch), batch)


# ---- steps -----------------------------------------------------------------------------------------------------------------


def warm_up_steps(max_seqs: int, max_tokens: int, longest: int) -> Iterator[StepPlan]:
    """Each with tenants of its own, who leave as the next step comes; the last step has none. No context exceeds `longest`."""
    before = 0
    for tenants in _shapes(max_seqs, max_tokens, longest):
        yield make_step(tenants, retired=before)
        before = len(tenants)
    yield make_step((), retired=before)


def _shapes(max_seqs: int, max_tokens: int, long: int) -> Iterator[Sequence[Tenant]]:
    for params in KINDS:
        yield [Tenant(1, 1, params)]
    most = min(max_seqs, max_tokens)
    for rows in sorted({min(size, most) for size in SINGLES}):
        yield [Tenant(1 if row % 2 else long, 1, KINDS[row % len(KINDS)]) for row in range(rows)]
    for rows in sorted({1, min(4, most)}):
        for _ in range(RECORDED):
            yield [Tenant(long, 1, RANDOM)] * rows
    for tokens in (size for size in PROMPTS if size <= min(max_tokens, long)):
        yield [Tenant(tokens, tokens)]
        beside = min(MIXED, max_seqs - 1, max_tokens - tokens)
        if beside > 0:
            yield [Tenant(tokens, tokens, RANDOM), *[Tenant(long, 1)] * beside]
