"""Admissions, rows and plans in one line each."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quire.runner.sampler.pipeline import Sampled, Sampler
from quire.runner.sampler.stage import Rows
from quire.types.plan import Admission, Outputs, RowShapes, StepPlan
from quire.types.sampling import SamplingParams

CPU = torch.device("cpu")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admission(
    slot: int = 0,
    tokens: Any = (1, 2, 3),
    *,
    prompt: int | None = None,
    start: int = 0,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Admission:
    known = np.array(tokens, np.int32)
    if bad_words:
        params["bad_words"] = [str(word) for word in bad_words]
    return Admission(
        slot, known, len(known) if prompt is None else prompt, start, SamplingParams(**params), seed, stop_ids, bad_words
    )


def rows_of(*admissions: Admission) -> Rows:
    """The rows in which these tenants draw their next token."""
    longest = max(len(a.tokens) for a in admissions) + 1
    tokens = torch.full((max(a.slot for a in admissions) + 1, longest), 7, dtype=torch.int32)  # 7: what an old tenant left
    for a in admissions:
        tokens[a.slot, : len(a.tokens)] = torch.from_numpy(a.tokens)
    slots = np.array([a.slot for a in admissions], np.int64)
    ends = np.array([len(a.tokens) for a in admissions], np.int64)
    prompts = np.array([a.prompt_length for a in admissions], np.int64)
    return Rows(slots, ends, prompts, *(torch.from_numpy(x) for x in (slots, ends, prompts)), tokens)


def sampler_of(vocabulary: int, *admissions: Admission, mode: Any = "raw_logprobs") -> Sampler:
    sampler = Sampler(max(a.slot for a in admissions) + 1, vocabulary, CPU, mode)
    for a in admissions:
        sampler.admit(a.slot, a)
    return sampler


def draw(logits: torch.Tensor, *admissions: Admission, mode: Any = "raw_logprobs") -> Sampled:
    """One row of logits per admission."""
    return sampler_of(logits.shape[1], *admissions, mode=mode).sample(logits.clone(), rows_of(*admissions))


def plan(step: int = 0, rows: Any = (), *, scored: Any = (), pool: Any = (), **parts: Any) -> StepPlan:
    """rows: (slot, count, end, sample) or (slot, count, end, sample, drafts); scored and pool: indices of tokens."""
    slot, count, end, sample, drafts = (ints(*(row[i] if i < len(row) else 0 for row in rows)) for i in range(5))
    outputs = replace(Outputs.last(count, sample * (1 + drafts)), prompt_logprobs=ints(*scored), pool=ints(*pool))
    return StepPlan(step=step, **parts, slot=slot, end=end, shapes=RowShapes(count, drafts, outputs))


def entries(*triples: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """(group, slot, index, page) each."""
    group, slot, index, page = (ints(*column) for column in zip(*triples, strict=True))
    return {"entry_group": group, "entry_slot": slot, "entry_index": index, "entry_page": page}
