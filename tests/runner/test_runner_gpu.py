"""The same sampler and runner on a CUDA device: integers exactly, tokens and logprobs as on the CPU."""

import dataclasses

import numpy as np
import pytest
import torch
from runner_support import CPU, admission, ints, plan, rows_of
from test_runner import LENGTH, PAGES, PROMPT, Driver, make_runner

from quire.device.registry import open_device
from quire.runner.sampler import gumbel
from quire.runner.sampler.pipeline import Sampler

pytestmark = pytest.mark.gpu

PARAMS = [
    {"temperature": 0},
    {"temperature": 0.6, "logprobs": 3},
    {"top_k": 30},
    {"top_p": 0.7, "temperature": 1.4},
    {"top_k": 900, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 0},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5, "logprob_token_ids": [5, 4]},
    {"logit_bias": {4: 5.0}, "min_tokens": 9, "allowed_token_ids": list(range(0, 4000, 3))},
]


def test_random_bits_are_the_same():
    seeds, positions = torch.tensor([0, -1, 2**63 - 1, 12345]), torch.tensor([0, 7, 2**31, 99])
    bits = [
        gumbel.random_bits(gumbel.row_keys(seeds.to(d), positions.to(d))[:, None], gumbel.steps(5000, torch.device(d))).cpu()
        for d in ("cpu", "cuda")
    ]
    assert torch.equal(*bits)
    assert torch.equal(gumbel.uniform(bits[0]), gumbel.uniform(bits[0].cuda()).cpu())


@pytest.mark.parametrize("levels", [None, 8], ids=["distinct", "ties"])
def test_the_sampler_draws_the_same(levels):
    tenants = [
        admission(i, [3, 4, 5, i], prompt=2, seed=i, stop_ids=(0,), bad_words=((i, 5), (6,)), **params)
        for i, params in enumerate(PARAMS * 8)
    ]
    logits = torch.randn(len(tenants), 4000, generator=torch.Generator().manual_seed(0)) * 3
    if levels:
        logits = (logits * levels).round() / levels
    rows, drawn = rows_of(*tenants), []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(len(tenants), 4000, device, "raw_logprobs")
        for tenant in tenants:
            sampler.admit(tenant.slot, tenant)
        updates = open_device(device.type).updates()
        sampler.columns.refresh(updates)
        updates.deliver()
        moved = {name: getattr(rows, name).to(device) for name in ("slot", "end", "prompt", "tokens")}
        drawn.append(sampler.sample(logits.to(device, copy=True), dataclasses.replace(rows, **moved)))
    assert drawn[1].ids.tolist() == drawn[0].ids.tolist()
    assert drawn[1].fault.tolist() == drawn[0].fault.tolist()
    torch.testing.assert_close(drawn[1].report.values.cpu()[:, 0], drawn[0].report.values[:, 0])


def test_the_runner_computes_the_same():
    a = admission(2, PROMPT, temperature=0.9, seed=3, logprobs=2, prompt_logprobs=1, presence_penalty=0.5)
    answers = []
    for device in ("cpu", "cuda"):
        runner = make_runner(device)
        runner.allocate(PAGES, LENGTH)
        driver = Driver(runner)
        flights = [driver.launch((2, 9), **driver.admit(a, 32)), driver.launch((2, 14))]
        flights += [driver.launch((2, 1)) for _ in range(7)]
        answers.append([flight.result() for flight in flights])
    cpu, cuda = answers
    assert [r.ids.tolist() for r in cuda] == [r.ids.tolist() for r in cpu]
    for ours, theirs in zip(cuda, cpu, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            assert getattr(ours, name).keys() == getattr(theirs, name).keys()
            for row, top in getattr(ours, name).items():
                np.testing.assert_allclose(top.values[:, 0], getattr(theirs, name)[row].values[:, 0], atol=2e-3)


def test_the_budget_is_what_is_left():
    runner = make_runner("cuda")
    total = torch.cuda.mem_get_info()[1]
    budget = runner.profile(0.5, None)
    assert 0 < budget < 0.5 * total
    assert runner.profile(0.6, None) - budget == pytest.approx(0.1 * total, rel=0.02)
    runner.allocate(PAGES, LENGTH)
    runner.launch(plan(1, retired=ints(0)))
    runner.close()
