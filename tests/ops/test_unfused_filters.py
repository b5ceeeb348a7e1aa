"""A sampler filter is one class, whether the draw is fused or made of stages: a toy one, top-a, is added here."""

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.features.logits_processors import loading
from quire.runner.sampler import pipeline
from quire.runner.sampler.pipeline import Sampler
from quire.runner.sampler.stage import Columns, Rows
from quire.types.plan import Admission
from tiny_model import make_model

INF = float("inf")


class TopA:
    """Drops what is less likely than `a` times the square of the largest probability; never the likeliest."""

    fields = ("extra_args",)

    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self._column = columns.make(np.float32, 0.0)
        self.applied = 0

    def wants(self, admission: Admission) -> bool:
        return bool(admission.params.extra_args)

    def admit(self, slot: int, admission: Admission) -> None:
        self._column[slot] = (admission.params.extra_args or {}).get("top_a", 0.0)

    def retire(self, slot: int) -> None:
        self._column.reset(slot)

    def active(self, rows: Rows) -> bool:
        return bool(self._column.used(rows.slots).any())

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        self.applied += len(rows.slots)
        chances = logits.softmax(1)
        best = chances.amax(1, keepdim=True)
        return logits.masked_fill_((chances < self._column.at(rows.slot)[:, None] * best**2) & (chances < best), -INF)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setattr(pipeline, "FILTERS", (TopA,))
    monkeypatch.setattr(loading, "refuse_extra_args", lambda params: None)


def params_of(top_a: float = 0.0, **options) -> SamplingParams:
    return SamplingParams(**options, extra_args={"top_a": top_a} if top_a else None)


def all_params() -> list[SamplingParams]:
    return [
        params_of(),
        params_of(temperature=0),
        params_of(0.5),
        params_of(0.5, temperature=0.4),
        params_of(1e9),
        params_of(2.0, temperature=1.7, top_k=20, top_p=0.8),
        params_of(1e9, temperature=0),
        params_of(0.3, logit_bias={5: 4.0}, logprobs=2),
        params_of(top_p=0.5, min_p=0.1),
    ]


def sample(logits: torch.Tensor, params: list[SamplingParams], seed: int, device: str, fused: bool):
    sampler = Sampler(len(params), logits.shape[1], torch.device(device), "raw_logprobs", fused=fused)
    for slot, one in enumerate(params):
        sampler.admit(slot, Admission(slot, np.zeros(3, np.int32), 3, 0, one, seed=seed + slot, stop_ids=(), bad_words=()))
    slots, ends = np.arange(len(params)), np.full(len(params), 3)
    there = [torch.from_numpy(x).to(device) for x in (slots, ends, ends)]
    rows = Rows(slots, ends, ends, *there, torch.zeros(len(params), 5, dtype=torch.int32, device=device))
    return sampler, sampler.sample(logits.clone().to(device), rows)


def test_it_draws_the_same_before_a_fused_draw_as_among_stages(device, monkeypatch):
    pytest.importorskip("triton")
    from quire.ops.kernels import sample as kernels

    if device != "cpu":
        pytest.skip("parameters are delivered by a runner there: the front door's test shows it")
    monkeypatch.setattr(kernels, "TILE", 512)
    params = all_params()
    for seed in range(3):
        logits = torch.randn(len(params), 300, generator=torch.Generator().manual_seed(seed)) * 2
        _, staged = sample(logits, params, seed, "cpu", fused=False)
        sampler, fused = sample(logits, params, seed, device, fused=True)
        assert fused.ids[: len(params)].tolist() == staged.ids.tolist() and not fused.fault[: len(params)].any()
        assert fused.ids[4] == logits[4].argmax()
        assert np.array_equal(fused.report.values, staged.report.values)  # raw logprobs are of what was before the filter
        assert sampler._unfused[0].applied == 5  # of nine rows: nobody pays who does not ask
        assert sampler.plain(np.array([0, 1, 8])) and not sampler.plain(np.array([2]))


def test_a_slot_forgets_it_with_its_tenant():
    sampler = Sampler(2, 50, torch.device("cpu"), "raw_logprobs", fused=True)
    sampler.admit(1, Admission(1, np.zeros(3, np.int32), 3, 0, params_of(0.5), seed=0, stop_ids=(), bad_words=()))
    assert not sampler.plain(np.array([1]))
    sampler.retire(1)
    assert sampler.plain(np.array([1]))


def test_through_the_front_door(tmp_path, device):
    """So large an `a` leaves the likeliest token alone: what is drawn at random is what a greedy request says."""
    llm = LLM(str(make_model(tmp_path)), device=device, kv_cache_memory_bytes=4 << 20)
    greedy, random = (
        llm.generate("a page", params_of(a, temperature=t, max_tokens=8, seed=3), use_tqdm=False)[0].outputs[0].token_ids
        for a, t in ((0.0, 0.0), (1e9, 1.5))
    )
    free = llm.generate("a page", params_of(temperature=1.5, max_tokens=8, seed=3), use_tqdm=False)[0].outputs[0].token_ids
    llm.llm_engine.shutdown()
    assert random == greedy != free
