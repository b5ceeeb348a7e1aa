"""Logprobs of prompt tokens, from a step's hidden states."""

import numpy as np
from torch import Tensor

from quire.models.decoder import Decoder
from quire.runner.batch import Built, compute_logits
from quire.runner.sampler.logprobs import Report
from quire.runner.sampler.pipeline import Sampler
from quire.runner.slots import Slots
from quire.runner.transfer import Longs, upload_together
from quire.types.plan import Ints, StepRows

PROMPT_PIECE = 256  # prompt positions whose logits are held at a time


def final_states(tokens: Ints, plan: StepRows, built: Built) -> Longs:
    """Where the hidden states of these of the step's tokens are."""
    return tokens + built.shift[plan.shapes.rows_of(tokens)]


def report_prompts(
    plan: StepRows, built: Built, hidden: Tensor, model: Decoder, slots: Slots, sampler: Sampler
) -> list[tuple[int, Report]]:
    """Logprobs of the prompt tokens that follow, a piece at a time."""
    tokens, reports = plan.outputs.prompt_logprobs, []
    rows, final = plan.shapes.rows_of(tokens), final_states(tokens, plan, built)
    for row in np.unique(rows).tolist():
        index, slot = np.flatnonzero(rows == row), int(plan.slot[row])
        for first in range(0, len(index), PROMPT_PIECE):
            piece = index[first : first + PROMPT_PIECE]
            states, at = upload_together([final[piece], tokens[piece]], slots.device)
            targets = slots.tokens[slot, built.batch.positions[at] + 1].long()
            logits = compute_logits(model, hidden[states], built.batch, tokens[piece])
            reports.append((row, sampler.logprobs.of_prompt(logits, targets, slot)))
    return reports
