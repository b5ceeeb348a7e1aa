"""A card in numbers: what an H200 was measured to take for steps of an 8B, and a clock that goes on by that. Which drafts are
right is a matter of dice."""

import random
from types import SimpleNamespace

import numpy as np
from workload import layout_of

from quire.engine.core import EngineCore
from quire.sched.scheduler import Scheduler
from quire.types.plan import StepPlan, StepResult
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.stats import NO_COUNTS, DeviceCounts

ROWS = (1, 16, 64, 256)
PLAIN = (4.16, 4.82, 6.0, 12.9)  # ms of a step without drafts
EACH = (0.01, 0.02, 0.026, 0.03)  # of each draft
WITH = 0.4  # of a step with any
PLANNING = (0.8, 0.9, 1.1, 2.0)  # of the host, behind a step's tokens: hidden where steps are planned ahead
PASS = 0.95  # of a draft model, for a guess of each row
READING = 0.003  # a prompt's token, by a draft model
PROMPT = 0.04  # and by the model


class Card:
    def __init__(self, speculation, rate: float = 0.0, depth: int = 1, seed: int = 0, recording: float = 0.0) -> None:
        """`recording`: ms that the first step with drafts takes longer of each size, for its graph."""
        self.now = self.free = 0.0
        self._recording, self._recorded = recording, set()
        self.rate, self._dice, self._ended, self.steps = rate, random.Random(seed), 0, []
        self.scheduler = Scheduler(
            layout_of((None,), 16), pages=12_000, max_model_len=4096, max_seqs=256, max_batched_tokens=8192,
            prefix_caching=False, speculation=speculation,
        )  # fmt: skip
        plan = self.scheduler.schedule

        def schedule(now: float) -> object:
            self.now += 1e-3 * np.interp(len(self.scheduler.running), ROWS, PLANNING)
            return plan(now)

        self.scheduler.schedule = schedule
        self.core = EngineCore(self.scheduler, self, depth, clock=lambda: self.now)
        self.counts = NO_COUNTS
        self.names, self._seen = 0, {}  # slot -> tokens that a draft model has read

    def run(self, requests: int, tokens: int = 256) -> float:
        """Seconds that so many requests take together."""
        began = self.now
        for i in range(requests):
            self.names += 1
            prompt = tuple(10 + (7 * i + j) % 1000 for j in range(128))
            spec = EngineRequest(
                f"r{self.names}", prompt, SamplingParams(max_tokens=tokens), 0, frozenset(), frozenset(), arrival=0.0
            )
            self.core.add(spec)
        while self.core.has_unfinished:
            self.core.step()
        return self.now - began

    def submit(self, plan: StepPlan) -> object:
        self._seen |= {each.slot: 0 for each in plan.admitted}
        self.free = landed = max(self.now, self.free) + 1e-3 * self._takes(plan)
        self.steps.append((len(plan.slot), int(plan.drafts.sum()), plan.next_drafts, int(plan.guesses.sum())))

        def result() -> StepResult:
            self.now = max(self.now, landed)
            if plan.next_drafts:
                self.free = max(self.free, self.now) + 1e-3 * (PASS * plan.next_drafts + READING * self._read(plan))
            return self._draw(plan)

        return SimpleNamespace(result=result)

    def _read(self, plan: StepPlan) -> int:
        """Tokens of the texts behind which there are guesses, that a draft model has not read: those of the last step are."""
        fresh = 0
        for slot, end, guesses in zip(plan.slot.tolist(), plan.end.tolist(), plan.guesses.tolist(), strict=True):
            if guesses:
                fresh += max(0, end - self._seen.get(slot, 0) - 10)
                self._seen[slot] = end
        return fresh

    def _takes(self, plan: StepPlan) -> float:
        rows, drafts = len(plan.slot), int(plan.drafts.sum())
        more = WITH + drafts * np.interp(rows, ROWS, EACH) if drafts else 0.0
        prompts, size = plan.tokens - drafts - rows, (plan.tokens - 1).bit_length()
        if drafts and self._recording and size not in self._recorded:
            self._recorded.add(size)
            self.counts = DeviceCounts(captures=len(self._recorded))
            more += self._recording
        return np.interp(rows, ROWS, PLAIN) + more + PROMPT * prompts

    def _draw(self, plan: StepPlan) -> StepResult:
        ids, lengths, at = [], [], 0
        for end, drafts, sample in zip(plan.end.tolist(), plan.drafts.tolist(), plan.sample.tolist(), strict=True):
            right = 0
            while right < drafts and self._dice.random() < self.rate:
                right += 1
            told = plan.draft_token[at : at + right].tolist() if len(plan.draft_token) else [5] * right
            at += drafts
            last = end - drafts + right
            lucky = right == drafts and self._dice.random() < self.rate
            ids += [*told, last % 1000 if lucky else 5000] if sample else []
            lengths.append(1 + right if sample else 0)
        return StepResult(plan.step, np.array(lengths, np.int32), np.array(ids, np.int32))


class Guessing:
    def propose(self, text, most: int) -> list[int]:
        return [(len(text.tokens) + i) % 1000 for i in range(most)]

    def finished(self, text) -> None:
        """It is of no use."""
