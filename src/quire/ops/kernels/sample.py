"""Sample tokens in two launches, for greedy and random rows alike, without sorting the vocabulary.

    _scan   one program per chunk of a row: its largest logit, the largest one with noise, its mass, and the maximum of each
            GROUP
    _pick   one program per row combines its chunks: enough for greedy and unfiltered rows

Filters keep the head of the order "larger first, lower id first among equals", so a filtered row is sampled without knowing
where the head ends: the token with the largest noisy logit is the sample if it is in the head. If not, no later token is, and
the search goes on among the tokens before it. Only groups whose maximum reaches a bound are read again: few for the usual
filters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import (
    BROKEN,
    CHUNK,
    GROUP,
    MAX_PENALIZED_LOGIT,
    NOTHING_ALLOWED,
    Factors,
    SampleColumns,
    SampleScratch,
)
from quire.ops.kernels.launcher import cdiv, launched, power_of_two

BLOCK = 1024
IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)  # bit of the prompt's tokens; the lower bits count output tokens


@launched
@triton.jit(do_not_specialize=["token_stride"])
def _penalize(
    logits,  # [N, V] float32
    rows,  # [n] int64
    slots,  # [n] int64
    ends,  # [n] int64
    prompts,  # [n] int64
    tokens,  # [S, L] int32
    repetitions,  # [S] float32
    frequencies,  # [S] float32
    presences,  # [S] float32
    counts,  # [m, V] int32 zeros
    logit_stride,
    token_stride,
    count_stride,
    MAX_PENALIZED_LOGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    slot, end, prompt = tl.load(slots + place), tl.load(ends + place), tl.load(prompts + place)
    history = tokens + slot * token_stride
    mine = counts + place * count_stride
    x = logits + tl.load(rows + place) * logit_stride
    repetition, frequency, presence = tl.load(repetitions + slot), tl.load(frequencies + slot), tl.load(presences + slot)
    for begin in tl.range(0, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(history + at, mask=at < end, other=0)
        tl.atomic_or(mine + token, IN_PROMPT, mask=at < prompt, sem="relaxed")
        tl.atomic_add(mine + token, 1, mask=(at >= prompt) & (at < end), sem="relaxed")
    tl.debug_barrier()
    for begin in tl.range(0, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(history + at, mask=at < end, other=0)
        taken = tl.atomic_xchg(mine + token, 0, mask=at < end, sem="relaxed")
        first = (at < end) & (taken != 0)
        count = (taken & (IN_PROMPT - 1)).to(tl.float32)
        before = tl.load(x + token, mask=first, other=0.0)
        value = tl.where(before > 0, tl.div_rn(before, repetition), before * repetition)
        value = value - frequency * count - tl.where(count > 0, presence, 0.0)
        value = tl.minimum(tl.maximum(value, -MAX_PENALIZED_LOGIT), MAX_PENALIZED_LOGIT)
        tl.store(x + token, tl.where(before > float("-inf"), value, before), mask=first)


def penalize(
    logits: Tensor, row: Tensor, slot: Tensor, end: Tensor, prompt: Tensor, tokens: Tensor, factors: Factors, counts: Tensor
) -> None:
    _penalize[(len(row),)](
        logits, row, slot, end, prompt, tokens, *factors, counts,
        logits.stride(0), tokens.stride(0), counts.stride(0), MAX_PENALIZED_LOGIT=MAX_PENALIZED_LOGIT, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


SCORES_CHUNK = 4096


@launched
@triton.jit
def _score_chunks(
    logits,  # [n, V] float32
    chosen,  # [n] int64
    peaks,  # [n, CHUNKS] float32
    masses,  # [n, CHUNKS] float32
    above,  # [n, CHUNKS] int32
    row_stride,
    VOCABULARY: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + at, mask=at < VOCABULARY, other=float("-inf"))
    bar = tl.load(logits + row * row_stride + tl.load(chosen + row))
    peak = tl.max(x)
    mine = row * CHUNKS + chunk
    tl.store(peaks + mine, peak)
    tl.store(masses + mine, tl.sum(tl.exp(x - tl.where(peak > float("-inf"), peak, 0.0))))
    tl.store(above + mine, tl.sum((x > bar).to(tl.int32)))


@launched
@triton.jit
def _score_rows(
    peaks,  # [n, CHUNKS] float32
    masses,  # [n, CHUNKS] float32
    above,  # [n, CHUNKS] int32
    tops,  # [n] float32
    spreads,  # [n] float32
    ranks,  # [n] int32
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    mine, exists = row * CHUNKS + chunk, chunk < CHUNKS
    peak = tl.load(peaks + mine, mask=exists, other=float("-inf"))
    top = tl.max(peak)
    shift = tl.where(top > float("-inf"), top, 0.0)
    mass = tl.sum(tl.load(masses + mine, mask=exists, other=0.0) * tl.exp(peak - shift))
    tl.store(tops + row, shift)
    tl.store(spreads + row, tl.log(mass))
    tl.store(ranks + row, tl.sum(tl.load(above + mine, mask=exists, other=0)) + 1)


def score(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, SCORES_CHUNK)
    peaks, masses = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device).unbind()
    above = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tops, spreads = torch.empty(2, rows, dtype=torch.float32, device=logits.device).unbind()
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    shape = {"CHUNKS": chunks}
    _score_chunks[(chunks, rows)](
        logits, chosen, peaks, masses, above, logits.stride(0), VOCABULARY=vocabulary, CHUNK=SCORES_CHUNK, **shape, num_warps=4
    )
    _score_rows[(rows,)](peaks, masses, above, tops, spreads, ranks, BLOCK=power_of_two(chunks), **shape, num_warps=1)
    return tops, spreads, ranks


TILE = 4096  # tokens per iteration of _pick
WARPS = 16

GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_FACTOR: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
LOWEST: tl.constexpr = tl.constexpr(float("-inf"))
INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def _mix(words):
    words = (words ^ (words >> 30)) * FIRST_FACTOR
    words = (words ^ (words >> 27)) * SECOND_FACTOR
    return words ^ (words >> 31)


@triton.jit
def _row_key(seeds, slot, end):
    """Return a key [1] uint64 of seed and position; a block, since only blocks wrap around everywhere."""
    one = tl.arange(0, 1)
    seed = tl.load(seeds + slot + one).to(tl.uint64, bitcast=True)
    return _mix(seed + (one + end + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def _noise(key, at):
    """Return Gumbel noise of the ids `at` (any shape): -log(-log(1 - u)), with an inner logarithm that is exact for small u."""
    bits = _mix(key + (at + 1).to(tl.uint64) * GOLDEN)
    u = (bits >> 11).to(tl.float32) * 1.1102230246251565e-16
    u = tl.minimum(tl.maximum(u, 5.551115123125783e-17), 0.9999999403953552)
    rest = 1.0 - u
    waiting = tl.where(rest == 1.0, u, -tl.log(rest) * tl.div_rn(u, tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(waiting)


@triton.jit
def _in_order(values):
    """Return uint32 keys that compare as the floats do."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit
def _from_order(key):
    bits = tl.where((key >> 31) == 1, key & 0x7FFFFFFF, ~key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _alike(keys, prefix, shift):
    """Return which keys have the known bits of the key that is searched, those above the next digit."""
    return ((keys ^ prefix) >> shift) >> 8 == 0


@triton.jit
def _digits(keys, shift):
    return ((keys >> shift) & 255).to(tl.int32)


@triton.jit
def _narrow(counts, prefix, rank, shift):
    """Extend `prefix` by the next digit of the rank-th largest key; counts [256]: of that digit among keys that share the
    prefix.

    Return the new prefix, and the key's rank among those that share it.
    """
    digit = tl.arange(0, 256)
    reaching = tl.sum(counts) - tl.cumsum(counts) + counts
    found = tl.sum((reaching >= rank).to(tl.int32)) - 1
    rank -= tl.sum(tl.where(digit > found, counts, 0))
    return (prefix | (found.to(tl.uint32) << shift)).to(tl.uint32), rank


@launched
@triton.jit
def _scan(
    logits,  # [N, V] float32
    sampling_slots,  # [N] int64 slot; -1: no sampling
    ends,  # [N] int64
    temperatures,  # [S] float32
    top_ks,  # [S] int64
    min_ps,  # [S] float32
    seeds,  # [S] int64
    peaks,  # [N, chunks] float32 largest logit
    places,  # [N, chunks] int32 its id
    noisy_peaks,  # [N, chunks] float32 largest logit with noise
    noisy_places,  # [N, chunks] int32
    masses,  # [N, chunks] float32 sum of exponentials, relative to the chunk's own largest
    groups,  # [N, groups] float32 maxima after temperature
    row_stride,
    VOCABULARY: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(sampling_slots + row)
    if slot >= 0:
        temperature = tl.load(temperatures + slot)
        unfiltered = (tl.load(top_ks + slot) >= VOCABULARY) & (tl.load(min_ps + slot) == 0)
        group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits + row * row_stride + at, mask=at < VOCABULARY, other=float("-inf"))
        x = tl.where(x != x, INFINITY, x)  # NaN counts as largest
        peak = tl.max(x)
        mine = row * CHUNKS + chunk
        tl.store(peaks + mine, peak)
        tl.store(places + mine, tl.min(tl.where(x == peak, at, NO_TOKEN)))
        if temperature > 0:
            y = tl.div_rn(x, temperature)
            tl.store(groups + row * GROUPS + group, tl.max(y, axis=1), mask=group < GROUPS)
            if unfiltered:
                top = tl.max(y)
                tl.store(masses + mine, tl.sum(tl.exp(y - tl.where(top > LOWEST, top, 0.0))))
                noisy = y + _noise(_row_key(seeds, slot, tl.load(ends + row))[:, None], at)
                noisiest = tl.max(noisy)
                tl.store(noisy_peaks + mine, noisiest)
                tl.store(noisy_places + mine, tl.min(tl.where(noisy == noisiest, at, NO_TOKEN)))


@triton.jit
def _list_groups(groups, members, bound, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr):
    """Write the groups with a maximum of at least `bound`; return how many."""
    group = tl.arange(0, GROUPS_BLOCK)
    reaches = (tl.load(groups + group, mask=group < GROUPS, other=float("-inf")) >= bound) & (group < GROUPS)
    place = tl.cumsum(reaches.to(tl.int32)) - 1
    tl.debug_barrier()  # wait for readers of the last list
    tl.store(members + place, group, mask=reaches)
    tl.debug_barrier()
    return tl.sum(reaches.to(tl.int32))


@triton.jit
def _listed(logits, members, begin, listed, temperature, VOCABULARY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return a tile of the tokens in listed groups: ids, logits after temperature (-inf: no token), and which exist."""
    lane = tl.arange(0, TILE)
    entry = begin + lane // GROUP
    group = tl.load(members + entry, mask=entry < listed, other=0)
    at = group * GROUP + lane % GROUP
    exists = (entry < listed) & (at < VOCABULARY)
    return at, tl.div_rn(tl.load(logits + at, mask=exists, other=float("-inf")), temperature), exists


@triton.jit
def _kth_largest(
    logits, groups, members, rank, temperature,
    VOCABULARY: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the rank-th largest logit after temperature. The rank-th largest of the groups' maxima is a lower bound."""
    bound = tl.full((), float("-inf"), tl.float32)
    if rank < GROUPS:
        group = tl.arange(0, GROUPS_BLOCK)
        keys = _in_order(tl.load(groups + group, mask=group < GROUPS, other=0.0))
        prefix = tl.full((), 0, tl.uint32)
        left = rank
        for level in tl.range(4):
            shift = (tl.full((), 24, tl.uint32) - 8 * level).to(tl.uint32)
            alike = _alike(keys, prefix, shift) & (group < GROUPS)
            prefix, left = _narrow(tl.histogram(_digits(keys, shift), 256, alike), prefix, left, shift)
        bound = _from_order(prefix)
    listed = _list_groups(groups, members, bound, GROUPS, GROUPS_BLOCK)
    found = tl.full((), 0, tl.uint32)
    for level in tl.range(4):
        shift = (tl.full((), 24, tl.uint32) - 8 * level).to(tl.uint32)
        counts = tl.zeros([256], tl.int32)
        for begin in tl.range(0, listed, TILE // GROUP):
            _, y, exists = _listed(logits, members, begin, listed, temperature, VOCABULARY, TILE, GROUP)
            keys = _in_order(y)
            counts += tl.histogram(_digits(keys, shift), 256, exists & _alike(keys, found, shift))
        found, rank = _narrow(counts, found, rank, shift)
    return _from_order(found)


@triton.jit
def _mass_before(
    logits, groups, members, pivot, place, temperature, top,
    VOCABULARY: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the sum of exponentials, relative to `top`, of the tokens before (pivot, place)."""
    listed = _list_groups(groups, members, pivot, GROUPS, GROUPS_BLOCK)
    mass = tl.zeros([TILE], tl.float32)
    for begin in tl.range(0, listed, TILE // GROUP):
        at, y, _ = _listed(logits, members, begin, listed, temperature, VOCABULARY, TILE, GROUP)
        mass += tl.where((y > pivot) | ((y == pivot) & (at < place)), tl.exp(y - top), 0.0)
    return tl.sum(mass)


@triton.jit
def _noisiest_before(
    logits, groups, members, key, pivot, place, temperature,
    VOCABULARY: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the id of the largest noisy logit among the tokens before (pivot, place)."""
    listed = _list_groups(groups, members, pivot, GROUPS, GROUPS_BLOCK)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.full([TILE], NO_TOKEN, tl.int32)
    for begin in tl.range(0, listed, TILE // GROUP):
        at, y, _ = _listed(logits, members, begin, listed, temperature, VOCABULARY, TILE, GROUP)
        noisy = tl.where((y > pivot) | ((y == pivot) & (at < place)), y + _noise(key, at), float("-inf"))
        where = tl.where(noisy > best, at, where)
        best = tl.maximum(noisy, best)
    return tl.min(tl.where(best == tl.max(best), where, NO_TOKEN))


@launched
@triton.jit(do_not_specialize=["token_stride", "out_stride"])
def _pick(
    logits,  # [N, V] float32
    sampling_slots,  # [N] int64
    ends,  # [N] int64
    temperatures,  # [S] float32
    top_ks,  # [S] int64
    top_ps,  # [S] float32
    min_ps,  # [S] float32
    seeds,  # [S] int64
    peaks,  # [N, chunks] float32
    places,  # [N, chunks] int32
    noisy_peaks,  # [N, chunks] float32
    noisy_places,  # [N, chunks] int32
    masses,  # [N, chunks] float32
    groups,  # [N, groups] float32
    members,  # [N, groups] int32 scratch
    faults,  # [N] int32 known before the logits were edited; -1: not edited
    tokens,  # [S, L] int32
    out,  # [2, ...] int32: ids, faults
    row_stride,
    token_stride,
    out_stride,
    BROKEN: tl.constexpr,
    NOTHING_ALLOWED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(sampling_slots + row)
    if slot >= 0:
        end = tl.load(ends + row)
        chunk = tl.arange(0, CHUNKS_BLOCK)
        mine = row * CHUNKS + chunk
        peak = tl.load(peaks + mine, mask=chunk < CHUNKS, other=float("-inf"))
        largest = tl.max(peak)
        token = tl.min(tl.where(peak == largest, tl.load(places + mine, mask=chunk < CHUNKS, other=NO_TOKEN), NO_TOKEN))
        finite = (largest > LOWEST) & (largest < INFINITY)
        known = tl.load(faults + row)
        fault = tl.where((known == 0) & (largest == LOWEST), NOTHING_ALLOWED, known)
        fault = tl.where(known >= 0, fault, tl.where(finite, 0, BROKEN))
        temperature = tl.load(temperatures + slot)
        if finite & (temperature > 0):
            x = logits + row * row_stride
            maxima, list_ = groups + row * GROUPS, members + row * GROUPS
            key = _row_key(seeds, slot, end)
            top = tl.div_rn(largest, temperature)
            rank, share, least = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
            floor = tl.full((), float("-inf"), tl.float32)
            if least > 0:
                floor = top + tl.log(least)
            if rank < VOCABULARY:
                kth = _kth_largest(
                    x, maxima, list_, rank.to(tl.int32), temperature, VOCABULARY, GROUPS, GROUPS_BLOCK, TILE, GROUP
                )
                floor = tl.maximum(floor, kth)
            if (rank < VOCABULARY) | (least > 0):
                token = _noisiest_before(
                    x, maxima, list_, key, floor, VOCABULARY, temperature, VOCABULARY, GROUPS, GROUPS_BLOCK, TILE, GROUP
                )
            else:
                noisy = tl.load(noisy_peaks + mine, mask=chunk < CHUNKS, other=float("-inf"))
                place = tl.load(noisy_places + mine, mask=chunk < CHUNKS, other=NO_TOKEN)
                token = tl.min(tl.where(noisy == tl.max(noisy), place, NO_TOKEN))
            if share < 1:
                if (rank < VOCABULARY) | (least > 0):
                    mass = _mass_before(
                        x, maxima, list_, floor, VOCABULARY, temperature, top, VOCABULARY, GROUPS, GROUPS_BLOCK, TILE, GROUP
                    )
                else:
                    each = tl.load(masses + mine, mask=chunk < CHUNKS, other=0.0)
                    mass = tl.sum(each * tl.exp(tl.div_rn(peak, temperature) - top))
                undecided = tl.full((), 1, tl.int32)
                while undecided > 0:
                    pivot = tl.div_rn(tl.load(x + token), temperature)
                    before = _mass_before(
                        x, maxima, list_, pivot, token, temperature, top, VOCABULARY, GROUPS, GROUPS_BLOCK, TILE, GROUP
                    )
                    # the first token always stays: there is none before it
                    undecided = ((before >= share * mass) & (before > 0)).to(tl.int32)
                    if undecided > 0:
                        token = _noisiest_before(
                            x, maxima, list_, key, pivot, token, temperature, VOCABULARY, GROUPS, GROUPS_BLOCK, TILE, GROUP
                        )
        tl.store(out + row, token)
        tl.store(out + out_stride + row, fault)
        tl.store(tokens + slot * token_stride + end, token)


def sample_rows(
    logits: Tensor, sampling_slot: Tensor, end: Tensor, columns: SampleColumns, tokens: Tensor, scratch: SampleScratch,
    fault: Tensor | None,
) -> None:  # fmt: skip
    vocabulary = logits.shape[1]
    chunks, groups = scratch.peaks.shape[1], scratch.groups.shape[1]
    shape = {"VOCABULARY": vocabulary, "CHUNKS": chunks, "GROUPS": groups, "GROUP": GROUP}
    stats = (scratch.peaks, scratch.places, scratch.noisy_peaks, scratch.noisy_places, scratch.masses, scratch.groups)
    _scan[(chunks, len(logits))](
        logits, sampling_slot, end, columns.temperature, columns.top_k, columns.min_p, columns.seed, *stats, logits.stride(0),
        **shape, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _pick[(len(logits),)](
        logits, sampling_slot, end, columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.seed, *stats,
        scratch.members, scratch.unedited if fault is None else fault, tokens, scratch.out,
        logits.stride(0), tokens.stride(0), scratch.out.stride(0),
        **shape, BROKEN=BROKEN, NOTHING_ALLOWED=NOTHING_ALLOWED,
        CHUNKS_BLOCK=power_of_two(chunks), GROUPS_BLOCK=max(power_of_two(groups), TILE // GROUP),
        TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
